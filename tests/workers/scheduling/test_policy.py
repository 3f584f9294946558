"""The policy's rules one by one, for any situation, and all of them as `policy_rules` states them."""

from __future__ import annotations

import copy
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.workers.policy_rules import Running, Snapshot, Waiting, decide_by_the_rules
from testkit.workers.recorded import decide_by_records as decide
from workers.scheduling.policy import ABSENT, BASE, LOADING, NO_MEMORY, READY

READINESS = st.sampled_from([READY, LOADING, ABSENT, NO_MEMORY])
VARIANTS = st.integers(0, 4)
COSTS = st.sampled_from([0.0, 1.0, 4.0])  # by which rows are divided without an error
GONE = 99
NOW = 100.0
PATIENCE = 10.0


@st.composite
def situations(draw: st.DrawFn) -> Snapshot:
    """Any mix of running and waiting requests; some parents are alive, some gone, some wait again."""
    s = draw(snapshots())
    running = [r if r.variant else r._replace(parent=None) for r in s.running]
    readiness = {**s.readiness, **dict.fromkeys((r.variant for r in running), READY)}
    return dataclasses.replace(s, running=running, readiness=readiness)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Possible records, sensible or not."""
    arrivals = draw(st.lists(st.integers(80, 100), max_size=16))
    running, waiting = [], []
    for key, arrival in enumerate(arrivals):
        variant = draw(VARIANTS)
        if draw(st.booleans()):
            waiting.append(Waiting(key, variant, float(arrival)))
            continue
        parent = draw(st.sampled_from([None, GONE, *(k for k in range(len(arrivals)) if k != key)]))
        running.append(Running(key, variant, float(arrival), draw(st.integers(0, 20)), parent))
    waiting.sort(key=place)
    readiness = {BASE: READY, **{uid: draw(READINESS) for uid in range(1, 5)}}
    limit, closed = draw(st.integers(1, 4)), draw(st.frozensets(st.integers(1, 4)))
    cost = {BASE: 0.0, **{uid: draw(COSTS) for uid in range(1, 5)}}
    return Snapshot(NOW, running, waiting, readiness, limit, PATIENCE, cost=cost, closed=closed)


def place(request: Running | Waiting) -> tuple[float, int]:
    """Requests in the line, and those that left it to run."""
    return request.arrival_s, request.key


def everyone(s: Snapshot) -> list[Running | Waiting]:
    return [*s.running, *s.waiting]


def running_variants(s: Snapshot) -> set[int]:
    return {r.variant for r in s.running} - {BASE}


def first_blocked(s: Snapshot) -> Waiting | None:
    """The definition: all variants before it have slots; with its own there would be too many, or no room."""
    for number, request in enumerate(s.waiting):
        active = running_variants(s) | {w.variant for w in s.waiting[:number]} | {BASE}
        if request.variant in active:
            continue
        if len(active - {BASE}) >= s.limit or s.readiness[request.variant] == NO_MEMORY:
            return request
    return None


def waited_for_too_long(s: Snapshot) -> set[int]:
    """Variants for which there is no seat, and whose first request is out of patience."""
    decision, blocked = decide(s), first_blocked(s)
    late = [w for w in s.waiting if blocked and place(w) >= place(blocked) and NOW - w.arrival_s > PATIENCE]
    return {w.variant for w in late} - decision.active - {BASE}


@settings(max_examples=10 * settings().max_examples)
@given(snapshots())
def test_the_decision_follows_the_rules(s: Snapshot) -> None:
    assert decide(s) == decide_by_the_rules(s)


@given(situations())
def test_at_most_the_limit_of_variants_gets_slots(s: Snapshot) -> None:
    decision = decide(s)
    assert running_variants(s) <= decision.active
    assert len(decision.active) <= max(s.limit, len(running_variants(s)))
    admitted = {w.variant for w in s.waiting if w.key in decision.admit}
    assert admitted - {BASE} <= decision.active
    assert set(decision.load) <= decision.active | {w.variant for w in [first_blocked(s)] if w}


@given(situations())
def test_the_base_always_runs_and_a_variant_only_once_it_is_there(s: Snapshot) -> None:
    decision = decide(s)
    for request in s.waiting:
        if request.variant == BASE:
            assert request.key in decision.admit
        if request.key in decision.admit:
            assert s.readiness[request.variant] == READY


@given(situations())
def test_a_request_that_is_not_behind_a_blocked_one_runs_in_turn(s: Snapshot) -> None:
    decision, blocked = decide(s), first_blocked(s)
    for request in s.waiting:
        if request is blocked:
            assert request.key in decision.blocked
            return
        assert request.key not in decision.parents
        assert (request.key in decision.admit) == (s.readiness[request.variant] == READY)
        if s.readiness[request.variant] == ABSENT:
            assert request.variant in decision.load
    assert not decision.blocked
    assert not decision.preempt


@given(situations())
def test_a_request_that_skips_the_line_has_a_living_parent_of_its_variant(s: Snapshot) -> None:
    decision, blocked = decide(s), first_blocked(s)
    variant_of = {r.key: r.variant for r in everyone(s)}
    place_of = {r.key: place(r) for r in everyone(s)}
    parent_of = {r.key: r.parent for r in s.running}
    for child, parent in decision.parents.items():
        assert blocked is not None
        assert child in decision.admit
        assert variant_of[child] == variant_of[parent] != BASE
        if child == parent:
            assert NOW - blocked.arrival_s > PATIENCE
            continue
        assert parent_of.get(parent) is None or place_of[parent] < place(blocked)
        assert parent in parent_of or place_of[parent] < place(blocked)  # runs, or begins in its turn
        rivals = [r for r in s.running if r.variant == variant_of[child]]
        rivals = [r for r in rivals if r.parent is None or place(r) < place(blocked)]
        if rivals:
            assert place_of[parent] == min(place(r) for r in rivals)


@given(situations())
def test_only_requests_of_running_variants_run_behind_a_blocked_request(s: Snapshot) -> None:
    """While it has patience, its children; later all requests whose variants run and are not closed: behind
    no request but themselves."""
    decision, blocked = decide(s), first_blocked(s)
    overdue = blocked is not None and NOW - blocked.arrival_s > PATIENCE
    behind = s.waiting[s.waiting.index(blocked) :] if blocked else []
    for request in behind:
        ready = s.readiness[request.variant] == READY
        if request.variant == BASE:
            continue
        if overdue:
            open_one = request.variant in decision.active - decision.closed
            assert (request.key in decision.admit) == (open_one and ready)
            assert decision.parents.get(request.key, request.key) == request.key
        assert (request.key in decision.admit) == (request.key in decision.parents)


@given(situations())
def test_a_variant_is_closed_for_each_that_is_waited_for_too_long(s: Snapshot) -> None:
    """As many as there are: first those that were active, then those with the fewest rows for their cost."""
    decision, late = decide(s), waited_for_too_long(s)
    rows = {v: sum(r.variant == v for r in s.running) for v in running_variants(s)}
    assert decision.closed <= rows.keys()
    must_leave = max(1, len(decision.active) + len(late) - s.limit) if late else 0
    assert len(decision.closed) == min(must_leave, len(rows))
    were = s.closed & rows.keys()
    assert were <= decision.closed or decision.closed <= were
    newly, others = decision.closed - were, rows.keys() - decision.closed - were
    for closed in newly:
        assert all(rows[closed] * s.cost[o] <= rows[o] * s.cost[closed] or not s.cost[o] for o in others)


@given(situations())
def test_exactly_orphans_with_far_to_go_that_came_after_a_blocked_request_step_back(s: Snapshot) -> None:
    """Once it is overdue, of the variants that make room for it."""
    blocked = first_blocked(s)
    overdue = blocked is not None and NOW - blocked.arrival_s > PATIENCE
    alive = {r.key for r in everyone(s)}
    expected = set()
    for r in s.running:
        is_orphan = r.parent is not None and r.parent not in alive
        came_after = blocked is not None and place(r) > place(blocked)
        leaves = not overdue or r.variant in decide(s).closed
        if is_orphan and came_after and leaves and r.tokens_left > s.almost_done_tokens:
            expected.add(r.key)
    assert set(decide(s).preempt) == expected


@given(situations())
def test_admissions_are_in_order_of_arrival_and_depend_on_nothing_else(s: Snapshot) -> None:
    before = copy.deepcopy(s)
    decision = decide(s)
    order = [w.key for w in s.waiting]
    assert decision.admit == [key for key in order if key in set(decision.admit)]
    assert len(set(decision.admit)) == len(decision.admit)
    assert len(set(decision.load)) == len(decision.load)
    assert s == before
    assert decide(before) == decision


@given(situations())
def test_only_the_first_request_without_room_asks_for_room(s: Snapshot) -> None:
    """Two variants that take room from each other would never be ready."""
    decision, blocked = decide(s), first_blocked(s)
    no_memory = [uid for uid in decision.load if s.readiness[uid] == NO_MEMORY]
    wanted = blocked is not None and s.readiness[blocked.variant] == NO_MEMORY
    assert no_memory == ([blocked.variant] if blocked and wanted else [])
    if wanted and blocked:
        assert blocked.variant not in decision.active
