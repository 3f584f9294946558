"""The scheduler's records against an account of the same requests by their ids, over many steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.workers.policy_rules import Decision, Running, Snapshot, Waiting, decide_by_the_rules
from workers.scheduling.admission_records import FIRST_SIZE, AdmissionRecords, variant_of
from workers.scheduling.policy import ABSENT, BASE, LOADING, NO_MEMORY, READY, Rules

PATIENCE_S = 20.0
READINESS = [READY, READY, READY, LOADING, ABSENT, NO_MEMORY]


class Adapter(NamedTuple):
    lora_int_id: int


@dataclass(eq=False)
class Request:
    """vLLM's requests."""

    request_id: str
    arrival_time: float
    lora_request: Any
    max_tokens: int = 40
    num_output_tokens: int = 0


def uid_of(variant: int) -> int:
    """Uids are far from being dense."""
    return 1000 * variant - 1


def cost_of(uid: int) -> float:
    return float(1 << uid % 3)


def number(request: Request) -> int:
    return int(request.request_id)


@dataclass
class Steps:
    """Requests come, run for a while as far as they are admitted, and end or are given up."""

    rng: random.Random
    variants: int
    limit: int = 3
    seats: int = 8
    records: AdmissionRecords = field(default_factory=AdmissionRecords)
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    ready: dict[int, int] = field(default_factory=dict)
    now: float = 0.0
    made: int = 0
    skips: int = 0

    def step(self, arriving: int) -> None:
        self.now += self.rng.choice([0.0, 1.0])
        for _ in range(arriving):
            self.arrive()
        self.rng.shuffle(self.waiting)
        self.ready = {uid_of(v): self.rng.choice(READINESS) for v in range(1, self.variants)}
        self.records.see(self.running, self.waiting, self.ready.__getitem__, cost_of)
        self.records.decide(self.now, Rules(self.limit, PATIENCE_S))
        decision = self.expected()
        self.check(decision)
        self.preempt(decision)
        self.begin(decision)
        self.end()

    def arrive(self) -> None:
        variant = self.rng.randrange(self.variants)
        adapter = Adapter(uid_of(variant)) if variant else None
        self.waiting.append(Request(f"{self.made:06}", self.now, adapter, self.rng.randint(1, 40)))
        self.made += 1

    def expected(self) -> Decision:
        running = [
            Running(
                number(r),
                variant_of(r),
                r.arrival_time,
                r.max_tokens - r.num_output_tokens,
                self.parents.get(number(r)),
            )
            for r in self.running
        ]
        line = sorted(self.waiting, key=lambda r: (r.arrival_time, number(r)))
        waiting = [Waiting(number(r), variant_of(r), r.arrival_time) for r in line]
        readiness = {**self.ready, BASE: READY}
        rules = self.limit, PATIENCE_S
        known = {variant_of(r) for r in (*self.running, *self.waiting)}
        cost = {uid: cost_of(uid) for uid in readiness}
        snapshot = Snapshot(
            self.now, running, waiting, readiness, *rules, cost=cost, closed=self.closed & known
        )
        decision = decide_by_the_rules(snapshot)
        self.closed = decision.closed
        return decision

    def check(self, decision: Decision) -> None:
        assert self.records.admitted() == {f"{key:06}" for key in decision.admit}
        assert [int(r.request_id) for r in self.records.preempted()] == decision.preempt
        assert self.records.loads() == decision.load
        assert [int(i) for i in self.records.blocked()] == decision.blocked
        first = self.records.first_blocked()
        assert (None if first is None else [int(first.request_id)]) == (decision.blocked[:1] or None)
        assert self.records.active() == decision.active

    def preempt(self, decision: Decision) -> None:
        for request in [r for r in self.running if number(r) in decision.preempt]:
            self.running.remove(request)
            self.waiting.append(request)

    def begin(self, decision: Decision) -> None:
        """As many requests as find room; some have to wait although they may run."""
        may = [r for r in self.waiting if number(r) in decision.admit and self.rng.random() < 0.8]
        begin = may[: max(0, self.seats - len(self.running))]
        skipped = 0
        for request in begin:
            self.waiting.remove(request)
            self.running.append(request)
            self.parents.pop(number(request), None)
            if number(request) in decision.parents:
                self.parents[number(request)] = decision.parents[number(request)]
                skipped += 1
        assert self.records.began({r.request_id for r in self.running}) == skipped
        self.skips += skipped

    def end(self) -> None:
        for request in self.running:
            request.num_output_tokens += self.rng.randint(1, 6)
        ended = [r for r in self.running if r.num_output_tokens >= r.max_tokens]
        ended += [r for r in self.waiting if self.rng.random() < 0.02]  # their clients have gone
        self.running = [r for r in self.running if r not in ended]
        self.waiting = [r for r in self.waiting if r not in ended]
        for request in ended:
            self.records.forget(request.request_id)
        assert len(self.records) == len(self.running) + len(self.waiting)


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 2**32))
def test_decisions_equal_those_of_a_reference_by_ids(arriving: list[int], seed: int) -> None:
    steps = Steps(random.Random(seed), variants=5)
    for count in arriving:
        steps.step(count)


@pytest.mark.parametrize("seed", range(3))
def test_decisions_stay_equal_beyond_the_first_allocation(seed: int) -> None:
    steps = Steps(random.Random(seed), variants=3 * FIRST_SIZE, limit=8, seats=2 * FIRST_SIZE)
    for count in (5 * FIRST_SIZE, 1, 0, 20 * FIRST_SIZE, *(3 for _ in range(30))):
        steps.step(count)
    assert steps.skips


def test_a_request_that_was_never_seen_waiting_is_a_parent_as_any_other() -> None:
    """It began while no variant was wanted, or while admission rested."""
    records = AdmissionRecords()
    first = Request("b", 1.0, Adapter(7))
    blocked, child = Request("c", 2.0, Adapter(8)), Request("a", 3.0, Adapter(7))
    records.see([first], [child, blocked], lambda uid: READY, cost_of)
    records.decide(3.0, Rules(1, PATIENCE_S))
    assert records.admitted() == {"a"}
    assert records.blocked() == ["c"]
    assert records.began({"a", "b"}) == 1
    records.forget("b")
    records.see([child], [blocked], lambda uid: READY, cost_of)
    records.decide(4.0, Rules(1, PATIENCE_S))
    assert records.preempted() == [child]


def test_the_first_id_of_simultaneous_requests_comes_first() -> None:
    records = AdmissionRecords()
    at_once = [Request(name, 5.0, Adapter(uid)) for uid, name in enumerate("dbca", start=1)]
    records.see([], at_once, lambda uid: READY, cost_of)
    records.decide(5.0, Rules(2, PATIENCE_S))
    assert records.admitted() == {"a", "b"}
    assert records.blocked() == ["c", "d"]


def test_a_step_without_a_decision_sends_nothing() -> None:
    records = AdmissionRecords()
    records.see([Request("r", 1.0, Adapter(1))], [Request("w", 2.0, Adapter(2))], lambda uid: READY, cost_of)
    records.decide(2.0, Rules(1, PATIENCE_S))
    assert records.blocked() == ["w"]
    records.clear()
    assert (records.admitted(), records.preempted(), records.blocked()) == (set(), [], [])
    assert records.began({"r", "w"}) == 0
    records.forget("never seen")
    assert len(records) == 2


def test_a_client_may_ask_for_any_number_of_tokens() -> None:
    records = AdmissionRecords()
    greedy = Request("r", 1.0, Adapter(1), max_tokens=10**30)
    records.see([greedy], [Request("w", 2.0, Adapter(2))], lambda uid: READY, cost_of)
    records.decide(2.0, Rules(1, PATIENCE_S))
    assert records.blocked() == ["w"]
