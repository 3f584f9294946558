"""The queue: which request goes next, which finds no place, and that no request starves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.state.terms import LatePolicy, Priority
from controlplane.traffic.request_queue import (
    LEAD,
    Full,
    Joined,
    QueueLimits,
    RequestQueue,
    Waiting,
    turns_at_most,
)
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant

LOW, NORMAL, HIGH = Priority
A, B, C = Tenant("a"), Tenant("b", weight=2.0), Tenant("c", weight=0.5, max_waiting=3)
TOKENS = (1, 9)
LIMITS = QueueLimits(places=12, aging_s=5.0, turns=3)


def of(tenant: Tenant = A, priority: Priority = NORMAL, tokens: int = 1, **targets: Any) -> RequestTerms:
    return RequestTerms(tenant=tenant, priority=priority, tokens=tokens, **targets)


def joined(queue: RequestQueue, terms: RequestTerms, now_s: float = 0.0) -> Waiting:
    outcome = queue.add(terms, now_s)
    assert isinstance(outcome, Joined)
    return outcome.waiting


def taken(queue: RequestQueue, now_s: float = 0.0) -> list[Waiting]:
    found = []
    while (waiting := queue.take(now_s)) is not None:
        found.append(waiting)
    return found


# --- by example ----------------------------------------------------------------------------------


def test_an_empty_line_has_no_request() -> None:
    queue = RequestQueue(LIMITS)
    assert (len(queue), queue.take(0.0), queue.remove(1), queue.drop_late(9.0)) == (0, None, None, [])


def test_the_highest_priority_goes_first_and_equals_in_the_order_in_which_they_came() -> None:
    queue = RequestQueue(LIMITS)
    asked = [LOW, NORMAL, HIGH, NORMAL, LOW, HIGH]
    for priority in asked:
        joined(queue, of(priority=priority))
    assert [w.number for w in taken(queue)] == [3, 6, 2, 4, 1, 5]


def test_the_request_with_the_earlier_due_time_goes_first_within_bounds() -> None:
    queue = RequestQueue(LIMITS)
    joined(queue, of(), 0.0)  # due at 5, as all without a target
    joined(queue, of(ttft_s=60.0), 0.0)
    joined(queue, of(ttft_s=1.0), 3.0)
    joined(queue, of(deadline_s=0.5), 4.6)
    assert [w.number for w in taken(queue, 4.7)] == [3, 1, 2, 4]


def test_tenants_share_by_weight() -> None:
    queue = RequestQueue(QueueLimits(100))
    for tenant in (A, B):
        for _ in range(30):
            joined(queue, of(tenant, tokens=5))
    first = [waiting.terms.tenant.name for waiting in taken(queue)[:30]]
    assert (first.count("a"), first.count("b")) == (10, 20)


def test_an_absent_tenant_gets_no_credit_for_that_time() -> None:
    queue = RequestQueue(QueueLimits(1000))
    for _ in range(50):
        joined(queue, of(A))
    assert len({queue.take(0.0) for _ in range(40)}) == 40
    other = Tenant("other")
    for _ in range(10):
        joined(queue, of(other))
    tenants = [waiting.terms.tenant for waiting in taken(queue)]
    assert (tenants[:10].count(A), tenants[:10].count(other)) == (5, 5)


def test_a_flood_does_not_keep_another_tenant_waiting() -> None:
    queue = RequestQueue(QueueLimits(1000))
    for _ in range(900):
        joined(queue, of(A))
    queue.take(0.0)
    late = joined(queue, of(Tenant("other")))
    assert late in [queue.take(0.0), queue.take(0.0)]


def test_urgent_requests_are_no_way_to_more_than_a_share() -> None:
    queue = RequestQueue(QueueLimits(1000))
    for _ in range(100):
        joined(queue, of(A, HIGH, tokens=5))
    for _ in range(100):
        joined(queue, of(B, LOW, tokens=5))
    first = [waiting.terms.tenant.name for waiting in taken(queue)[: 3 * 30]]
    assert first.count("a") == pytest.approx(30, abs=LEAD)
    assert first.count("b") == pytest.approx(60, abs=LEAD)


def test_a_flood_of_urgent_requests_keeps_another_tenants_waiting_for_a_few_turns_only() -> None:
    queue = RequestQueue(QueueLimits(1000))
    for _ in range(900):
        joined(queue, of(A, HIGH))
    for _ in range(100):
        queue.take(0.0)
    late = joined(queue, of(Tenant("other"), LOW))
    assert late in [queue.take(0.0) for _ in range(LEAD + 2)]


def test_the_more_urgent_request_of_tenants_near_their_shares_goes_first() -> None:
    queue = RequestQueue(QueueLimits(1000))
    tenants = [Tenant(f"t{number}") for number in range(20)]
    for tenant in tenants:
        joined(queue, of(tenant, LOW))
        joined(queue, of(tenant, HIGH))
    order = [waiting.terms.priority for waiting in taken(queue)]
    assert order == [HIGH] * 20 + [LOW] * 20


def test_an_aged_lower_priority_gets_one_of_every_n_turns() -> None:
    queue = RequestQueue(replace(LIMITS, places=100))
    for priority, count in ((LOW, 3), (NORMAL, 3), (HIGH, 20)):
        for _ in range(count):
            joined(queue, of(priority=priority))
    assert {w.terms.priority for _ in range(4) if (w := queue.take(4.9))} == {HIGH}
    order = [w.terms.priority for _ in range(12) if (w := queue.take(5.0))]
    assert order == [HIGH, HIGH, NORMAL, HIGH, HIGH, LOW] * 2


def test_an_aged_request_goes_even_when_no_request_is_above_it_at_its_turns() -> None:
    """Otherwise the lowest would have had all of these turns, and the highest all others."""
    queue = RequestQueue(QueueLimits(1000, aging_s=5.0, turns=4))
    for _ in range(200):
        joined(queue, of(priority=LOW))
    one = joined(queue, of(priority=NORMAL))
    order = []
    for turn in range(turns_at_most(one, [], [], TOKENS, 4)):
        if turn % 4 != 3:
            joined(queue, of(priority=HIGH), 5.0)
        order.append(queue.take(5.0))
    assert one in order


def test_a_changed_weight_holds_at_once() -> None:
    queue = RequestQueue(QueueLimits(1000))
    for name in ("changed", "other"):
        for _ in range(100):
            joined(queue, of(Tenant(name)))
    joined(queue, of(Tenant("changed", weight=4.0)))
    first = [waiting.terms.tenant.name for waiting in taken(queue)[:50]]
    assert first.count("changed") == pytest.approx(40, abs=LEAD)


def test_a_tenant_that_was_alone_owes_nothing() -> None:
    queue = RequestQueue(QueueLimits(1000))
    for _ in range(50):
        joined(queue, of(A, HIGH))
        assert queue.take(0.0) is not None
    for _ in range(50):
        joined(queue, of(Tenant("other"), LOW))
    urgent = joined(queue, of(A, HIGH))
    assert queue.take(0.0) == urgent


def test_a_newcomer_of_a_higher_priority_displaces_the_youngest_of_the_lowest() -> None:
    queue = RequestQueue(QueueLimits(3))
    for priority in (LOW, LOW, NORMAL):
        joined(queue, of(priority=priority))
    assert queue.add(of(priority=LOW), 0.0) is Full.LINE
    for priority, displaced in ((HIGH, 2), (NORMAL, 1)):
        outcome = queue.add(of(priority=priority), 0.0)
        assert isinstance(outcome, Joined)
        assert outcome.displaced is not None
        assert outcome.displaced.number == displaced
    assert queue.add(of(priority=NORMAL), 0.0) is Full.LINE
    assert [w.terms.priority for w in taken(queue)] == [HIGH, NORMAL, NORMAL]


def test_a_tenant_has_its_own_places() -> None:
    queue = RequestQueue(LIMITS)
    for _ in range(3):
        joined(queue, of(C))
    assert queue.add(of(C), 0.0) is Full.TENANT
    outcome = queue.add(of(C, HIGH), 0.0)
    assert isinstance(outcome, Joined)
    assert outcome.displaced is not None
    assert outcome.displaced.number == 3
    joined(queue, of(A))


def test_places_are_shared_by_weight_when_all_are_taken() -> None:
    queue = RequestQueue(QueueLimits(9))
    for _ in range(9):
        joined(queue, of(A))
    displaced = []
    while isinstance(outcome := queue.add(of(B), 0.0), Joined):
        assert outcome.displaced is not None
        displaced.append(outcome.displaced.number)
    assert displaced == [9, 8, 7, 6, 5, 4]  # of 9 places 6 are those of the one with twice the weight
    assert outcome is Full.LINE
    assert queue.add(of(A), 0.0) is Full.LINE
    urgent = queue.add(of(A, HIGH), 0.0)
    assert isinstance(urgent, Joined)
    assert urgent.displaced is not None
    assert urgent.displaced.terms.tenant == A  # the others are within their share


def test_a_tenant_below_its_share_of_places_displaces_a_tenant_above_its_share() -> None:
    queue = RequestQueue(QueueLimits(4))
    for priority in (HIGH, HIGH, NORMAL, HIGH):
        joined(queue, of(A, priority))
    outcomes = [queue.add(of(Tenant("other"), LOW), 0.0) for _ in range(3)]
    displaced = [
        out.displaced.number if isinstance(out, Joined) and out.displaced else out for out in outcomes
    ]
    assert displaced == [3, 4, Full.LINE]


def test_an_urgent_request_beyond_its_share_displaces_less_urgent_ones_of_tenants_above_theirs() -> None:
    """Each tenant's share of seven places is three and a half."""
    queue = RequestQueue(QueueLimits(7))
    x, y = Tenant("x"), Tenant("y")
    for tenant, priority in [(x, NORMAL)] * 4 + [(y, HIGH)] * 3:
        joined(queue, of(tenant, priority))
    assert queue.add(of(y, NORMAL), 0.0) is Full.LINE
    urgent = queue.add(of(y, HIGH), 0.0)
    assert isinstance(urgent, Joined)
    assert urgent.displaced is not None
    assert (urgent.displaced.terms.tenant, urgent.displaced.number) == (x, 4)
    assert queue.add(of(y, HIGH), 0.0) is Full.LINE  # x has less than its share now


def test_the_tenant_furthest_above_its_weighted_share_loses_a_place() -> None:
    # Tenant x has six of nine places and a share of seven; z has two and a share of one and a half.
    queue = RequestQueue(QueueLimits(9))
    x, y, z = Tenant("x", weight=4.0), Tenant("y"), Tenant("z")
    for tenant in (x,) * 7 + (z,) * 2:
        joined(queue, of(tenant))
    outcome = queue.add(of(y), 0.0)
    assert isinstance(outcome, Joined)
    assert outcome.displaced is not None
    assert outcome.displaced.terms.tenant == z


def test_late_requests_are_dropped_on_request() -> None:
    queue = RequestQueue(LIMITS)
    drop = LatePolicy.DROP
    joined(queue, of(ttft_s=2.0, late=drop), 0.0)
    joined(queue, of(ttft_s=1.0), 0.0)
    joined(queue, of(deadline_s=1.0, late=drop), 0.5)
    joined(queue, of(late=drop), 0.0)
    assert queue.drop_late(1.4) == []
    assert [w.number for w in queue.drop_late(2.0)] == [3, 1]
    assert [w.number for w in taken(queue, 9.0)] == [2, 4]


# --- any schedule --------------------------------------------------------------------------------

_terms = st.builds(
    of,
    st.sampled_from([A, B, C]),
    st.sampled_from(Priority),
    st.integers(*TOKENS),
    ttft_s=st.sampled_from([None, 0.5, 3.0, 20.0]),
    late=st.sampled_from(LatePolicy),
)
_steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.5, 4.0]), st.one_of(_terms, _terms, st.none(), st.integers(0, 11))
    ),
    max_size=80,
)


@dataclass
class Books:
    """A line, and a list of those that should be in it."""

    queue: RequestQueue = field(default_factory=lambda: RequestQueue(LIMITS))
    there: list[Waiting] = field(default_factory=list)
    served: list[tuple[Waiting, frozenset[str]]] = field(default_factory=list)
    now_s: float = 0.0

    def step(self, after_s: float, what: RequestTerms | int | None) -> None:
        """A request comes, is taken (None), or leaves (its place in the list). Late requests are dropped."""
        self.now_s += after_s
        for late in self.queue.drop_late(self.now_s):
            assert late.terms.dropped_after_s is not None
            assert late.arrived_s + late.terms.dropped_after_s <= self.now_s
            self.there.remove(late)
        if isinstance(what, RequestTerms):
            self._add(what)
        elif what is None:
            self._take()
        elif what < len(self.there):
            leaving = self.there.pop(what)
            assert self.queue.remove(leaving.number) == leaving
            assert self.queue.remove(leaving.number) is None

    def _add(self, terms: RequestTerms) -> None:
        outcome = self.queue.add(terms, self.now_s)
        own = [w for w in self.there if w.terms.tenant == terms.tenant]
        bound = terms.tenant.max_waiting
        full = len(self.there) >= LIMITS.places or (bound is not None and len(own) >= bound)
        if isinstance(outcome, Full):
            assert full
            assert all(w.terms.priority.level >= terms.priority.level for w in own)
            return
        assert full == (outcome.displaced is not None)
        if outcome.displaced is not None:
            self._displaced(outcome.displaced, outcome.waiting)
        self.there.append(outcome.waiting)

    def _displaced(self, lost: Waiting, by: Waiting) -> None:
        losing, coming = ([w for w in self.there if w.terms.tenant == x.terms.tenant] for x in (lost, by))
        assert lost == min(losing, key=lambda w: (w.terms.priority.level, -w.number))
        if lost.terms.tenant == by.terms.tenant:
            assert lost.terms.priority.level < by.terms.priority.level
        else:
            present = {w.terms.tenant.name: w.terms.tenant.weight for w in (*self.there, by)}
            share = LIMITS.places * lost.terms.tenant.weight / sum(present.values())
            assert len(losing) > share - 1e-9
            if lost.terms.priority.level >= by.terms.priority.level:
                had = len(losing) / lost.terms.tenant.weight
                assert had > (len(coming) + 1) / by.terms.tenant.weight - 1e-9
        self.there.remove(lost)

    def _take(self) -> None:
        backlogged = frozenset(w.terms.tenant.name for w in self.there)
        waiting = self.queue.take(self.now_s)
        assert (waiting is None) == (not self.there)
        if waiting is not None:
            self.there.remove(waiting)
            self.served.append((waiting, backlogged))

    def check(self) -> None:
        queue = self.queue
        assert list(queue) == self.there
        assert len(queue) == len(self.there) <= LIMITS.places
        assert sum(w.terms.tenant is C for w in self.there) <= 3


@given(_steps)
def test_the_books_are_right_after_any_schedule(steps: list[Any]) -> None:
    books = Books()
    for step in steps:
        books.step(*step)
        books.check()
    rest = [w.number for w in taken(books.queue, books.now_s)]
    assert sorted(rest) == [w.number for w in books.there]
    assert len(books.queue) == 0


@given(_steps)
def test_equal_requests_go_in_the_order_of_arrival(steps: list[Any]) -> None:
    books = Books()
    for step in steps:
        books.step(*step)
    order = [w for w, _ in books.served] + taken(books.queue, books.now_s)
    for terms in {w.terms for w in order}:
        numbers = [w.number for w in order if w.terms == terms]
        assert numbers == sorted(numbers)


def _shares(served: Sequence[tuple[Waiting, frozenset[str]]]) -> Iterator[tuple[float, float]]:
    """The tokens of tenants a and b in every run of turns in which both had requests waiting."""
    for begin in range(len(served)):
        had = {A.name: 0.0, B.name: 0.0}
        for waiting, backlogged in served[begin:]:
            if not {A.name, B.name} <= backlogged:
                break
            tenant = waiting.terms.tenant
            if tenant.name in had:
                had[tenant.name] += waiting.terms.tokens / tenant.weight
            yield had[A.name], had[B.name]


@given(_steps, st.sampled_from(Priority), st.sampled_from(Priority))
def test_tenants_that_both_wait_get_their_share_of_tokens(
    steps: list[Any], of_a: Priority, of_b: Priority
) -> None:
    """The bound of start-time fair queueing, and what LEAD adds to it, whatever other requests come, leave or
    are displaced, and whatever is urgent."""
    books = Books()
    for tenant, priority in ((A, of_a), (B, of_b)):  # so that both wait for a while
        for tokens in (3, 9, 1, 7, 4):
            books.step(0.0, of(tenant, priority, tokens))
    for step in steps:
        books.step(*step)
        books.step(0.0, None)
    bound = (LEAD + 1) * (TOKENS[1] / A.weight + TOKENS[1] / B.weight)
    assert all(abs(a - b) <= bound + 1e-9 for a, b in _shares(books.served))


@given(_steps, _terms, st.lists(_terms, min_size=1, max_size=6), st.integers(0, 3))
def test_an_aged_request_goes_within_a_bounded_number_of_turns(
    steps: list[Any], terms: RequestTerms, flood: list[RequestTerms], newcomers: int
) -> None:
    """However many come after it, in front of whomever they would like to be."""
    books = Books()
    for step in steps:
        books.step(*step)
    one = next((w for w in books.there if w.terms.late is LatePolicy.FINISH), None)
    if one is None:
        outcome = books.queue.add(terms._replace(late=LatePolicy.FINISH), books.now_s)
        if isinstance(outcome, Full):
            return
        one = outcome.waiting
    now_s = max(books.now_s, one.arrived_s + LIMITS.aging_s)
    same = [
        w for w in books.queue if (w.terms.tenant, w.terms.priority) == (one.terms.tenant, one.terms.priority)
    ]
    others = [tenant for tenant in (A, B, C) if tenant != one.terms.tenant]
    before = [w for w in same if w != one]  # at most
    bound = turns_at_most(one, before, others, TOKENS, LIMITS.turns)
    for turn in range(bound):
        for k in range(newcomers):
            if len(books.queue) < LIMITS.places:  # else it might be displaced, as it may be by its own tenant
                books.queue.add(flood[(turn + k) % len(flood)], now_s)
        if one.number not in books.queue:
            return
        if books.queue.take(now_s) == one:
            return
        now_s += 0.01
    pytest.fail(f"it still waits after {bound} turns")
