"""The policy's rules one by one, for any situation, written here a second time and more plainly."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from workers.scheduling.policy import BASE, Readiness, Running, Snapshot, Waiting, decide

VARIANTS = st.integers(0, 4)
NOW = 100.0
PATIENCE = 10.0


@st.composite
def situations(draw: st.DrawFn) -> Snapshot:
    """Any mix of running and waiting requests; some parents are alive, some gone, some wait again."""
    arrivals = draw(st.lists(st.integers(60, 100), max_size=16))
    running, waiting = [], []
    for number, arrival in enumerate(arrivals):
        name, variant = f"r{number}", draw(VARIANTS)
        if draw(st.booleans()):
            waiting.append(Waiting(name, variant, float(arrival)))
            continue
        parent = draw(
            st.sampled_from([None, "gone", *(f"r{n}" for n in range(len(arrivals)) if n != number)])
        )
        left = draw(st.integers(0, 20))
        running.append(Running(name, variant, float(arrival), left, parent if variant else None))
    waiting.sort(key=place)
    readiness = {uid: draw(st.sampled_from(list(Readiness))) for uid in range(1, 5)}
    readiness |= dict.fromkeys((BASE, *(r.variant for r in running)), Readiness.READY)
    return Snapshot(NOW, running, waiting, readiness, draw(st.integers(1, 4)), PATIENCE)


def place(request: Running | Waiting) -> tuple[float, str]:
    """In the line, whoever has left it to run included."""
    return request.arrival_s, request.id


def everyone(s: Snapshot) -> list[Running | Waiting]:
    return [*s.running, *s.waiting]


def running_variants(s: Snapshot) -> set[int]:
    return {r.variant for r in s.running} - {BASE}


def first_blocked(s: Snapshot) -> Waiting | None:
    """By definition: all before it have seats; with its own there would be too many, or no room."""
    for number, request in enumerate(s.waiting):
        active = running_variants(s) | {w.variant for w in s.waiting[:number]} | {BASE}
        if request.variant in active:
            continue
        if len(active - {BASE}) >= s.limit or s.readiness[request.variant] is Readiness.NO_MEMORY:
            return request
    return None


@given(situations())
def test_no_more_variants_than_the_limit_get_seats(s: Snapshot) -> None:
    decision = decide(s)
    assert running_variants(s) <= decision.active_variants
    assert len(decision.active_variants) <= max(s.limit, len(running_variants(s)))
    admitted = {w.variant for w in s.waiting if w.id in decision.admit}
    assert admitted - {BASE} <= decision.active_variants
    assert set(decision.load) <= decision.active_variants | {w.variant for w in [first_blocked(s)] if w}


@given(situations())
def test_the_base_always_runs_and_a_variant_only_once_it_is_there(s: Snapshot) -> None:
    decision = decide(s)
    for request in s.waiting:
        if request.variant == BASE:
            assert request.id in decision.admit
        if request.id in decision.admit:
            assert s.readiness[request.variant] is Readiness.READY


@given(situations())
def test_whoever_is_not_behind_a_blocked_request_runs_in_turn(s: Snapshot) -> None:
    decision, blocked = decide(s), first_blocked(s)
    for request in s.waiting:
        if request is blocked:
            assert request.id in decision.blocked
            return
        assert request.id not in decision.parents
        assert (request.id in decision.admit) == (s.readiness[request.variant] is Readiness.READY)
        if s.readiness[request.variant] is Readiness.ABSENT:
            assert request.variant in decision.load
    assert not decision.blocked
    assert not decision.preempt


@given(situations())
def test_who_skips_the_line_has_a_living_parent_of_its_variant(s: Snapshot) -> None:
    decision, blocked = decide(s), first_blocked(s)
    variant_of = {r.id: r.variant for r in everyone(s)}
    place_of = {r.id: place(r) for r in everyone(s)}
    parent_of = {r.id: r.parent for r in s.running}
    for child, parent in decision.parents.items():
        assert blocked is not None
        assert child in decision.admit
        assert variant_of[child] == variant_of[parent] != BASE
        assert child != parent
        assert parent_of.get(parent) is None or place_of[parent] < place(blocked)
        assert parent in parent_of or place_of[parent] < place(blocked)  # runs, or begins in its turn
        rivals = [r for r in s.running if r.variant == variant_of[child]]
        rivals = [r for r in rivals if r.parent is None or place(r) < place(blocked)]
        if rivals:
            assert place_of[parent] == min(place(r) for r in rivals)


@given(situations())
def test_nobody_skips_the_line_once_a_blocked_request_has_waited_too_long(s: Snapshot) -> None:
    decision, blocked = decide(s), first_blocked(s)
    if blocked and NOW - blocked.arrival_s > PATIENCE:
        assert not decision.parents
    behind = s.waiting[s.waiting.index(blocked) :] if blocked else []
    for request in behind:
        if request.variant != BASE and request.id in decision.admit:
            assert request.id in decision.parents


@given(situations())
def test_exactly_orphans_with_far_to_go_that_came_after_a_blocked_request_step_back(s: Snapshot) -> None:
    blocked = first_blocked(s)
    alive = {r.id for r in everyone(s)}
    expected = set()
    for r in s.running:
        is_orphan = r.parent is not None and r.parent not in alive
        if blocked and is_orphan and place(r) > place(blocked) and r.tokens_left > s.almost_done_tokens:
            expected.add(r.id)
    assert set(decide(s).preempt) == expected


@given(situations())
def test_admissions_are_in_order_of_arrival_and_depend_on_nothing_else(s: Snapshot) -> None:
    before = copy.deepcopy(s)
    decision = decide(s)
    order = [w.id for w in s.waiting]
    assert decision.admit == [i for i in order if i in set(decision.admit)]
    assert len(set(decision.admit)) == len(decision.admit)
    assert len(set(decision.load)) == len(decision.load)
    assert s == before
    assert decide(before) == decision


@given(situations())
def test_only_the_first_of_those_without_room_asks_for_it(s: Snapshot) -> None:
    """Two variants that take room from each other would never be ready."""
    decision, blocked = decide(s), first_blocked(s)
    no_memory = [uid for uid in decision.load if s.readiness[uid] is Readiness.NO_MEMORY]
    wanted = blocked is not None and s.readiness[blocked.variant] is Readiness.NO_MEMORY
    assert no_memory == ([blocked.variant] if blocked and wanted else [])
    if wanted and blocked:
        assert blocked.variant not in decision.active_variants
