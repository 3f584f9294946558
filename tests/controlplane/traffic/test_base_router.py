"""A gateway's sums over its requests, against sums over those in `routed`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.routing.orders import order_all
from controlplane.routing.snapshot import ELSEWHERE, IN_HOST_MEMORY, IN_SLOT, LOADING, NO_PROMISE, ORDER
from controlplane.traffic.base_router import PLACE_EVERY_S, BaseRouter, RoutingRules
from controlplane.traffic.live_snapshot import equal_rows
from controlplane.traffic.member import Member, RoutedRequest
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.worker_health import Takes
from profiler.compiled import Records, records
from profiler.step_time.records import MAX_ROWS, PREFILL_KNOTS, STEP_MODEL, VARIANT
from workers.load_lines import STALE_S
from workers.messages import WorkerLoad

MILLISECOND = 1e-3


@dataclass
class Models:
    """Two models, the second twice as slow; variant 7 of rank 16 in column 1, variant 8 of rank 64 in 2."""

    models: Records
    variants: Records
    model_of_group: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 1})
    variant_rows: dict[int, int] = field(default_factory=lambda: {7: 1, 8: 2})


def models(max_rows: int = 8) -> Models:
    made = records(STEP_MODEL, 2)
    for number, model in enumerate(made):
        model.decode_s[:] = (number + 1) * (5e-3 + 1e-4 * np.arange(MAX_ROWS + 1))
        model.prefill_s[:] = (number + 1) * (5e-3 + 1e-3 * np.arange(PREFILL_KNOTS + 1))
        model.prefill_grain, model.batched_tokens, model.max_rows = 16.0, 2048, max_rows
        model.kv_tokens, model.slots, model.context_s = 1 << 20, 4, 1e-8
    variants = records(VARIANT, (2, 3))
    variants.kind = -1
    for column, (rank, number) in {1: (16, 2), 2: (64, 4)}.items():
        for one in variants[:, column]:
            one.kind, one.rank, one.rank_class, one.row_s, one.variant_s = 0, rank, number, 1e-5, 2e-5
    return Models(made, variants)


def router(
    *groups: str, rules: RoutingRules | None = None, limit: int = 64
) -> tuple[BaseRouter, list[Member]]:
    made = BaseRouter(rules or RoutingRules(), 0.0)
    members = [Member(name, limit) for name in groups]
    made.set_members(members)
    return made, members


def sent(to: BaseRouter, request: InferenceRequest | None = None, now_s: float = 0.0) -> RoutedRequest:
    routed = to.send(request or InferenceRequest(), now_s)
    assert routed is not None
    return routed


def load(ongoing: int, variants: tuple[tuple[int, str], ...] = (), **more: Any) -> WorkerLoad:
    given = {"running": ongoing, "waiting": 0, "kv_usage": 0.0, "steps": 0, "step_s": 0.0} | more
    return WorkerLoad(ongoing=ongoing, prefill_tokens=0, prefill_s=0.0, variants=variants, **given)


def group_of(of: BaseRouter, member: Member) -> Any:
    assert of.snapshot is not None
    return of.snapshot.groups[member.slot]


# --- which one -----------------------------------------------------------------------------------


def test_a_request_without_step_models_goes_to_the_worker_with_the_fewest_requests() -> None:
    for ready in (True, False):
        made = BaseRouter(RoutingRules(), 0.0, is_ready=ready)
        members = [Member(name, 64) for name in "abcde"]
        made.set_members(members)
        for _ in range(50):
            sent(made)
        assert [member.own for member in members] == [10] * 5


def test_equals_share_what_comes_at_random() -> None:
    made, members = router(*"abcd")
    counts = {member.group: 0 for member in members}
    for _ in range(400):
        routed = sent(made)
        counts[routed.member.group] += 1
        made.ended(routed)
    assert min(counts.values()) > 40  # the mean is 100, with a standard deviation of 8.7


def test_a_session_goes_to_one_place_whichever_gateway_has_it() -> None:
    """While all are idle."""
    gateways = [router(*order)[0] for order in ("abcd", "dbca", "cadb")]
    for session in ("x", "y", "z"):
        request = InferenceRequest(RequestTerms(session=session))
        places = set()
        for made in gateways:
            routed = sent(made, request)
            places.add(routed.member.group)
            made.ended(routed)
        assert len(places) == 1


@pytest.mark.parametrize("terms", [{"session": "s"}, {"beginning": 12345}])
def test_a_conversation_stays_where_its_prompt_is_cached_unless_that_costs_more(
    terms: dict[str, Any],
) -> None:
    made, _ = router("a", "a2")
    made.learn(models(max_rows=64))
    request = InferenceRequest(RequestTerms(prompt_tokens=1000, tokens=1100, **terms))
    first = sent(made, request)
    home = first.member
    made.filled(first)
    made.ended(first, 100)
    while (
        beside := sent(made, InferenceRequest(RequestTerms(prompt_tokens=10, tokens=20)))
    ).member is not home:
        made.ended(beside)  # ties are broken at random
    made.filled(beside)
    follow = sent(made, request)
    assert follow.member is home, "the other one is idle, and would fill the whole prompt again"
    made.ended(follow)
    for _ in range(40):
        made._live.sent(
            home.slot, made._row(InferenceRequest(RequestTerms(prompt_tokens=2000, tokens=4000)), 0.0)
        )
    assert sent(made, request).member is not home


@pytest.mark.parametrize(("factor", "most"), [(1.0, 8), (1.25, 10)])
def test_only_as_many_are_sent_as_an_engine_runs(factor: float, most: int) -> None:
    made, members = router("a", limit=100, rules=RoutingRules(in_flight_factor=factor))
    made.learn(models(max_rows=8))
    in_flight = [sent(made) for _ in range(most)]
    assert made.send(InferenceRequest(), 0.0) is None
    made.ended(in_flight[3])
    assert sent(made).member is members[0]


def test_never_more_than_a_worker_takes() -> None:
    made, _ = router("a", "b", limit=3)
    made.learn(models(max_rows=8))
    for _ in range(6):
        sent(made)
    assert made.send(InferenceRequest(), 0.0) is None


def test_requests_of_other_gateways_take_room_and_count_as_rows() -> None:
    made, (a, b) = router("a", "a2", limit=4)
    sent(made)
    made.loaded(a, load(ongoing=a.own + 3), 0.0)
    assert (a.foreign, int(group_of(made, a).batch.rows)) == (3, a.own + 3)
    assert all(sent(made).member is b for _ in range(4 - b.own - (1 if a.own == 0 else 0)))
    made.loaded(a, load(ongoing=0), 1.0)
    assert (a.foreign, int(group_of(made, a).batch.rows)) == (0, a.own)


def test_a_stale_report_of_a_worker_is_forgotten() -> None:
    made, (a,) = router("a")
    made.loaded(a, load(ongoing=5), 1.0)
    made.tick(1.0 + STALE_S)
    assert a.foreign == 5
    made.tick(1.1 + STALE_S)
    assert a.foreign == 0
    assert int(group_of(made, a).batch.rows) == 0


def test_the_residency_of_variants_is_shown() -> None:
    made, (a,) = router("a")
    made.learn(models())
    routed = sent(made, InferenceRequest(variant=8, streams=True))
    assert made.snapshot is not None
    where = made.snapshot.held.where[:, a.slot]
    assert list(where[:3]) == [ELSEWHERE, ELSEWHERE, LOADING]
    made.loaded(a, load(1, ((7, "host"), (99, "device"))), 0.0)
    assert list(where[:3]) == [ELSEWHERE, IN_HOST_MEMORY, LOADING]
    made.filled(routed)
    assert where[2] == IN_SLOT
    made.ended(routed)
    made.loaded(a, load(0, ((7, "device"),)), 0.0)
    assert list(where[:3]) == [ELSEWHERE, IN_SLOT, ELSEWHERE]


def test_predictions_follow_what_steps_take() -> None:
    """Engines that take 1.4 times as long as predicted."""
    made, (a,) = router("a")
    made.learn(models())
    in_flight = [sent(made, InferenceRequest(streams=True)) for _ in range(4)]
    for routed in in_flight:
        made.filled(routed)
    truth_s = 1.4 * float(group_of(made, a).tpot_s)
    for second in range(100):
        made.loaded(a, load(4, steps=50, step_s=truth_s), float(second))
    assert float(group_of(made, a).correction) == pytest.approx(1.4, rel=0.02)
    assert made.error == pytest.approx(0.0, abs=0.01)
    for observed_s in (math.nan, math.inf, 0.0, -1.0):
        made.loaded(a, load(4, steps=50, step_s=observed_s), 200.0)
    assert float(group_of(made, a).correction) == pytest.approx(1.4, rel=0.02)


def test_a_request_waits_for_a_worker_with_room() -> None:
    made, members = router("a", "b", "c", limit=2)
    in_flight = [sent(made, InferenceRequest(variant=n % 3)) for n in range(6)]
    assert made.send(InferenceRequest(), 0.0) is None
    assert [member.own for member in members] == [2, 2, 2]
    made.ended(in_flight[0])
    assert sent(made).member is in_flight[0].member
    made.tick(PLACE_EVERY_S)


def test_expected_answers_follow_those_seen_and_their_limit() -> None:
    made, _ = router("a")
    for _ in range(200):
        made.ended(sent(made, InferenceRequest(variant=7)), 40)
        made.ended(sent(made, InferenceRequest(variant=8)), 400)
    long = RequestTerms(tokens=10_000)
    expected = {uid: made._row(InferenceRequest(long, uid), 0.0)[2] for uid in (7, 8)}
    assert expected == {7: pytest.approx(40), 8: pytest.approx(400)}
    assert made._row(InferenceRequest(RequestTerms(tokens=11), 8), 0.0)[2] == 10


def test_whole_answers_have_their_prompt_filled_once_nothing_waits() -> None:
    made, (a,) = router("a")
    sent(made, InferenceRequest(RequestTerms(prompt_tokens=50, tokens=60)), now_s=0.0)
    made.loaded(a, load(1, waiting=1), 5.0)
    assert float(group_of(made, a).unfilled) == 50
    made.loaded(a, load(1, waiting=0), 5.0)
    assert float(group_of(made, a).unfilled) == 0


def test_step_models_that_make_no_sense_are_left_out() -> None:
    made, (a,) = router("a")
    routed = sent(made, InferenceRequest(variant=7))
    broken = models()
    broken.model_of_group["a"] = 9
    made.learn(broken)
    assert sent(made, InferenceRequest(variant=8)).member is a
    made.ended(routed)
    assert int(group_of(made, a).batch.rows) == 1
    made.learn(models())
    assert a.limit == 8


def test_memory_is_bounded_by_what_is_in_flight() -> None:
    """Variants come and go, with no step model that names them."""
    made, _ = router("a")
    for uid in range(1, 3000):
        made.ended(sent(made, InferenceRequest(variant=uid)), 5)
    assert made.snapshot is not None
    assert made.snapshot.held.shape[0] < 100


# --- any order of events -------------------------------------------------------------------------


class Reference:
    """Sums over the requests in routed, by what they ask for alone."""

    def __init__(self, of: BaseRouter) -> None:
        self.of = of

    def check(self, member: Member, in_flight: list[RoutedRequest]) -> None:
        snapshot = self.of.snapshot
        assert snapshot is not None
        group, held = snapshot.groups[member.slot], snapshot.held[:, member.slot]
        assert member.own == len(in_flight)
        assert group.batch.rows == len(in_flight) + member.foreign
        contexts = sum(f.row.prompt + f.row.output / 2 for f in in_flight)
        prompt, output = (member.typical.prompt, member.typical.output) if member.typical else (0.0, 0.0)
        contexts += member.foreign * (prompt + output / 2)
        assert group.batch.context == pytest.approx(contexts, rel=1e-6, abs=1e-3)
        unfilled = sum(f.row.prompt for f in in_flight if not f.filled)
        assert group.unfilled == pytest.approx(unfilled, rel=1e-6, abs=1e-3)
        rows: dict[int, int] = {0: member.foreign}
        for routed in in_flight:
            uid = routed.request.variant
            rows[uid] = rows.get(uid, 0) + 1
        by_column = {self.of._live._columns[uid]: count for uid, count in rows.items() if count}
        assert {v: int(h.rows) for v, h in enumerate(held) if h.rows} == by_column
        assert group.distinct == len([uid for uid, count in rows.items() if uid and count])
        promises = [f.row.promise for f in in_flight] + [NO_PROMISE] * member.foreign
        assert sum(group.promises) == len(promises)
        assert group.tightest == min(promises, default=NO_PROMISE)
        assert bool(group.usable) is member.has_room
        model = snapshot.models[group.model]
        step_s = 0.0
        if len(promises):
            kinds = {7: 1e-5, 8: 1e-5} if self.of._models is not None else {}
            step_s = float(model.decode_s[len(promises)]) + float(model.context_s) * contexts
            step_s += sum(kinds.get(uid, 0.0) * count for uid, count in rows.items())
            step_s += sum(2e-5 for uid, count in rows.items() if uid in kinds and count)
        assert group.step_s == pytest.approx(float(group.correction) * step_s, rel=1e-6, abs=1e-9)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ("send", "send", "send", "filled", "ended", "ended", "load", "come", "go", "learn", "tick")
        ),
        st.integers(0, 1000),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=2 * settings().max_examples)
@given(EVENTS, st.booleans())
def test_sums_are_those_of_the_requests_in_flight(events: list[tuple[str, int]], late_start: bool) -> None:  # noqa: PLR0912
    made = BaseRouter(RoutingRules(), 0.0, is_ready=not late_start)
    members: list[Member] = [Member("a", 6), Member("b", 6)]
    made.set_members(members)
    in_flight: list[RoutedRequest] = []
    known = [models(), models(max_rows=3)]
    for now_s, (what, number) in enumerate(events):
        if what == "send":
            terms = RequestTerms(
                tpot_s=(None, 0.01, 0.02)[number % 3],
                prompt_tokens=number + 1,
                tokens=2 * number + 2,
                session=str(number % 4) if number % 2 else "",
            )
            had_room = any(member.has_room for member in members)
            routed = made.send(
                InferenceRequest(terms, (0, 7, 8, 9, 10 + number % 40)[number % 5]), float(now_s)
            )
            assert (routed is not None) is had_room
            if routed is not None:
                assert routed.member in members
                in_flight.append(routed)
        elif what == "filled" and in_flight:
            made.filled(in_flight[number % len(in_flight)])
        elif what == "ended" and in_flight:
            routed = in_flight.pop(number % len(in_flight))
            made.ended(routed, number if number % 3 else None)
            made.ended(routed)
        elif what == "load" and members:
            member = members[number % len(members)]
            made.loaded(
                member, load(number % 9, waiting=1, variants=((number % 12, "device"),)), float(now_s)
            )
        elif what == "come":
            members = [*members, Member(f"g{now_s}", 6)]
            made.set_members(members)
        elif what == "go" and members:
            members = [m for m in members if m is not members[number % len(members)]]
            made.set_members(members)
        elif what == "learn":
            made.learn(known[number % 2])
        elif what == "tick":
            made.start_routing()
            made.tick(float(now_s))
    made.start_routing()
    for member in members:
        Reference(made).check(member, [f for f in in_flight if f.member is member])
    assert made.has_room is any(member.has_room for member in members)
    for routed in in_flight:
        made.ended(routed)
    for member in members:
        Reference(made).check(member, [])


def test_equal_rows_cost_the_same() -> None:
    model = equal_rows()[0]
    steps = np.diff(model.decode_s)
    assert np.allclose(steps, steps[0])
    assert steps[0] > 0


def test_requests_that_turn_out_longer_count_as_longer() -> None:
    """A KV cache with twice the tokens that were expected; what stays so for long is believed."""
    to, (member,) = router("a")
    to.learn(models())
    for _ in range(6):
        sent(to, InferenceRequest(RequestTerms(tokens=300, prompt_tokens=100)))
    assert to.snapshot is not None
    group = to.snapshot.groups[member.slot]
    assert group.stretch == 1.0
    usage = 2 * float(group.batch.context) / (1 << 20)
    for _ in range(500):
        to.loaded(member, load(6, kv_usage=usage), 0.0)
    assert group.stretch == pytest.approx(2.0, rel=0.02)
    to.loaded(member, load(6, waiting=2, kv_usage=0.9), 0.0)  # the cache does not hold all of them
    assert group.stretch == pytest.approx(2.0, rel=0.02)


# --- many workers ----------------------------------------------------------------------------------------


def recomputed_orders(of: BaseRouter) -> Any:
    assert of.snapshot is not None
    fresh = of.snapshot._replace(orders=records(ORDER, of.snapshot.orders.shape))
    order_all(fresh)
    return fresh.orders


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 48))
def test_kept_orders_of_many_workers_equal_recomputed_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made, known = BaseRouter(RoutingRules(), 0.0), models(4)
    members = [Member(f"{n}", 5) for n in range(45)]
    known.model_of_group = {member.group: n % 2 for n, member in enumerate(members)}
    made.set_members(members[:40])
    made.learn(known)
    in_flight: list[RoutedRequest] = []
    now_s = 0.0
    for _ in range(150):
        now_s += 0.2
        member = members[int(rng.integers(40))]
        kind = rng.integers(12)
        if kind <= 5:
            terms = RequestTerms(tpot_s=0.02 if rng.random() < 0.5 else None)
            routed = made.send(InferenceRequest(terms, int(rng.choice([0, 7, 8, 9])), streams=True), now_s)
            in_flight += [routed] if routed is not None else []
        elif kind == 6 and in_flight:
            made.filled(in_flight[int(rng.integers(len(in_flight)))])
        elif kind <= 8 and in_flight:
            made.ended(in_flight.pop(int(rng.integers(len(in_flight)))), 20)
        elif kind == 9:
            told = load(int(rng.integers(9)), ((7, "device"),), steps=9, step_s=0.01, kv_usage=0.01)
            made.loaded(member, told, now_s)
        elif kind == 10:
            made.tick(now_s)
        elif rng.random() < 0.2:
            made.set_members(members[int(rng.integers(5)) : 45 - int(rng.integers(5))])
            members = [one if one.slot >= 0 else Member(one.group, 5) for one in members]
    if made.has_room:
        sent(made)
        assert made.snapshot is not None
        expected = recomputed_orders(made)
        groups = made.snapshot.orders.group
        usable = int((made.snapshot.groups.usable == 1).sum())
        assert (groups[:, :usable] == expected.group[:, :usable]).all()
        assert made.snapshot.orders.key == pytest.approx(expected.key)


def test_idle_workers_among_many_share_new_requests() -> None:
    made = BaseRouter(RoutingRules(), 0.0)
    made.set_members([Member(f"{n}", 64) for n in range(100)])
    for _ in range(300):
        sent(made)
    assert [member.own for member in made.members] == [3] * 100


# --- sequences -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.booleans()), max_size=40),
    st.integers(1, 24),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_places_are_those_of_the_sequences_under_way(
    events: list[tuple[int, int, bool]], limit: int, is_ready: bool
) -> None:
    """`events`: which worker's oldest request ends first (2: none), how wide the next one is, and whether
    step models change before it."""
    made = BaseRouter(RoutingRules(), 0.0, is_ready=is_ready)
    members = [Member(name, limit) for name in "ab"]
    made.set_members(members)
    known = models(max_rows=limit)
    for which, width, learns in events:
        if which < 2 and members[which].routed:
            made.ended(next(iter(members[which].routed)))
        if learns:
            made.learn(models(max_rows=limit) if made._models is known else known)
        free = [member.fits(width) for member in members]
        routed = made.send(InferenceRequest(RequestTerms(sequences=width)), 0.0)
        assert (routed is not None) == any(free)
        assert routed is None or free[members.index(routed.member)]
        for member in members:
            assert member.places == sum(f.request.terms.sequences for f in member.routed)
            assert member.own == len(member.routed)
            assert member.places <= limit or member.own == 1
            if is_ready:
                assert group_of(made, member).batch.rows == member.places
                assert group_of(made, member).usable == int(member.has_room)
        assert made.has_room == any(member.has_room for member in members)
    for member in members:
        for routed in list(member.routed):
            made.ended(routed)
    assert [member.places for member in members] == [0, 0]
    if is_ready:
        assert all(group_of(made, member).batch.rows == 0 for member in members)


def test_a_worker_on_trial_has_one_request_at_a_time() -> None:
    made, (one, other) = router("a", "b")
    made.set_takes(one, Takes.ONE)
    made.set_takes(other, Takes.NONE)
    trial = sent(made)
    assert trial.member is one
    assert made.send(InferenceRequest(), 0.0) is None
    made.ended(trial)
    again = sent(made)
    assert again.member is one
    made.set_takes(one, Takes.ALL)
    assert [sent(made).member for _ in range(3)] == [one] * 3
    made.set_takes(other, Takes.ALL)
    assert sent(made).member is other
