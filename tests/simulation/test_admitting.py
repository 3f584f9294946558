"""Which requests wait, are refused, displaced or dropped: as if the gateway's line were asked at every
event."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.simulation.admitting import Admitting
from controlplane.simulation.run import run
from controlplane.simulation.world import (
    DISPLACED,
    DONE,
    DROPPED,
    LATE,
    LINE_FULL,
    NO_REASON,
    REFUSED,
    TENANT_FULL,
    WOULD_BE_LATE,
    World,
    room_for_ended,
)
from controlplane.state.terms import LatePolicy, Priority
from controlplane.traffic.admission import Admission, Reason, Refused
from controlplane.traffic.request_queue import QueueLimits, Waiting
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant
from testkit.simulation import worlds
from testkit.simulation.stepwise import Asked, Machine

MACHINE = Machine(base_s=0.05, token_s=1e-3, budget=500, kv_tokens=1000)
TENANTS = (Tenant("one", 2.0), Tenant("other", 1.0, max_waiting=2))
TERMS = st.builds(
    RequestTerms,
    ttft_s=st.sampled_from([None, 0.1, 0.3, 1.0]),
    priority=st.sampled_from(Priority),
    late=st.sampled_from(LatePolicy),
    tenant=st.sampled_from(TENANTS),
    tokens=st.integers(1, 50),
)
REQUESTS = st.lists(st.tuples(st.floats(0, 1.5), st.integers(1, 100), TERMS), min_size=1, max_size=40).map(
    lambda requests: sorted(requests, key=lambda request: request[0])
)
LIMITS = st.builds(QueueLimits, st.integers(1, 6), st.sampled_from([0.2, 10.0]), st.integers(1, 3))


REASONS = {
    Reason.PROMISE: WOULD_BE_LATE,
    Reason.FULL_LINE: LINE_FULL,
    Reason.FULL_TENANT: TENANT_FULL,
}


def _late_s(waiting: Waiting) -> float:
    after_s = waiting.terms.dropped_after_s
    return math.inf if after_s is None else waiting.arrived_s + after_s


@dataclass
class Desk:
    """One server, one request at a time, and the queue in front of it."""

    requests: list[tuple[float, int, RequestTerms]]
    limits: QueueLimits
    refuses: bool
    said: dict[int, tuple[int, int]] = field(default_factory=dict)
    sent_s: dict[int, float] = field(default_factory=dict)

    def serve(self) -> None:
        self.line = Admission(self.limits)
        self.answered_s: float | None = None  # how long the one being served takes, if it had waited
        self.numbers: dict[int, int] = {}
        self.free_s = -math.inf
        for i, (now_s, _, _) in enumerate(self.requests):
            self._until(now_s)
            if now_s > self.free_s and not self.line:
                self._send(i, now_s)
            else:
                self._join(i, now_s)
        self._until(math.inf)

    def _until(self, now_s: float) -> None:
        while self.line or self.answered_s is not None:
            late_s = min((_late_s(waiting) for waiting in self.line), default=math.inf)
            event_s = min(self.free_s, late_s)
            if event_s > now_s or (event_s == now_s and event_s == self.free_s):
                return
            if event_s == self.free_s and self.answered_s is not None:
                self.line.answered(self.answered_s, event_s)
                self.answered_s = None
            for late in self.line.drop_late(event_s):
                self.said[self.numbers[late.number]] = DROPPED, LATE
            if event_s == self.free_s and (waiting := self.line.next(event_s)) is not None:
                self._send(self.numbers[waiting.number], event_s)
                self.answered_s = self.free_s - event_s

    def _send(self, i: int, now_s: float) -> None:
        self.said[i], self.sent_s[i] = (DONE, NO_REASON), now_s
        self.free_s = now_s + MACHINE.prefill_s(self.requests[i][1])

    def _join(self, i: int, now_s: float) -> None:
        terms = self.requests[i][2]
        for late in self.line.drop_late(now_s):
            self.said[self.numbers[late.number]] = DROPPED, LATE
        joined = self.line.arrive(terms, now_s, self.refuses)
        if isinstance(joined, Refused):
            self.said[i] = REFUSED, REASONS[joined.reason]
            return
        self.numbers[joined.waiting.number] = i
        if joined.displaced is not None:
            self.said[self.numbers[joined.displaced.number]] = REFUSED, DISPLACED


def simulated(requests: list[tuple[float, int, RequestTerms]], limits: QueueLimits, refuses: bool) -> World:
    world = worlds.new(MACHINE, [Asked(at_s, prompt, 1) for at_s, prompt, _ in requests], max_ongoing=1)
    admitting = Admitting(world, lambda i: requests[i][2], limits, refuses)
    run(world, worlds.rules(max_ongoing=1), math.inf, room_for_ended(world), admitting)
    return world


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(REQUESTS, LIMITS, st.booleans())
def test_the_simulated_line_gets_its_events_in_time(
    requests: list[tuple[float, int, RequestTerms]], limits: QueueLimits, refuses: bool
) -> None:
    desk = Desk(requests, limits, refuses)
    desk.serve()
    world = simulated(requests, limits, refuses)
    for i in range(len(requests)):
        outcome = world.outcomes[i]
        assert (outcome.state, outcome.reason) == desk.said[i]
        if i in desk.sent_s:
            assert outcome.sent_s == pytest.approx(desk.sent_s[i])


def test_every_reason_occurs() -> None:
    """The queue has one place, which the second tenant may not use."""
    nobody, low = Tenant("nobody", max_waiting=0), Priority.LOW
    requests = [
        (0.00, 100, RequestTerms()),
        (0.01, 1, RequestTerms(priority=low)),
        (0.02, 1, RequestTerms(priority=low)),
        (0.03, 1, RequestTerms(tenant=nobody)),
        (0.04, 1, RequestTerms(ttft_s=0.05, late=LatePolicy.DROP)),
    ]
    world = simulated(requests, QueueLimits(1), refuses=True)
    reasons = [NO_REASON, DISPLACED, LINE_FULL, TENANT_FULL, LATE]
    assert world.outcomes.reason.tolist() == reasons
    assert world.outcomes.state.tolist() == [DONE, REFUSED, REFUSED, REFUSED, DROPPED]


def test_a_request_that_would_be_late_is_refused_once_the_line_s_speed_is_known() -> None:
    requests = [(0.001 * n, 50, RequestTerms(tokens=10)) for n in range(20)]
    requests += [
        (1.5, 50, RequestTerms(tokens=10, ttft_s=0.2)),
        (1.51, 50, RequestTerms(tokens=10, ttft_s=9.0)),
    ]
    world = simulated(requests, QueueLimits(100), refuses=True)
    assert world.outcomes.reason[-2:].tolist() == [WOULD_BE_LATE, NO_REASON]
    assert (world.outcomes.state[:-2] == DONE).all()


def test_no_request_is_refused_without_a_line_of_its_tenant() -> None:
    world = worlds.new(MACHINE, [Asked(0.001 * n, 10, 3) for n in range(50)], max_ongoing=2)
    world.asked.ttft_s = 0.01
    run(world, worlds.rules(max_ongoing=2), math.inf, room_for_ended(world))
    assert (world.outcomes.state == DONE).all()
    assert world.gateway.longest[0] == 48
