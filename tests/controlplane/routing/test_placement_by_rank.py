"""LoRAServe-like placement: intervals of load in order of rank, against the same in fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controlplane.baselines.routing.by_rank import COLD, HOT, place
from controlplane.routing.snapshot import Snapshot, new_snapshot
from controlplane.routing.state import MAX_HOMES, RouterState, new_state
from profiler.compiled import records
from profiler.step_time.records import CLASSES, RANK_CLASSES, STEP_MODEL
from testkit.controlplane.random_snapshots import World, made_absurd, world

seeds = st.integers(0, 1 << 48)


def plain(groups: int, classes: list[int], rates: list[float], seed: int) -> tuple[Snapshot, RouterState]:
    """Groups of one model, and variants with these ranks and rates; the base is before them."""
    rng = np.random.default_rng(seed)
    snapshot = new_snapshot(groups, len(classes) + 1, records(STEP_MODEL, 1))
    snapshot.groups.key = rng.permutation(np.arange(1, groups + 1, dtype=np.uint64))
    snapshot.models.decode_s = 10e-3 + np.arange(513) * 1e-5
    snapshot.models.max_rows, snapshot.models.kv_tokens = 512, 1 << 30
    state = new_state(len(classes) + 1, 1)
    snapshot.variants[0, 1:].rank_class = classes
    snapshot.variants[0, 1:].rank = [RANK_CLASSES[c] for c in classes]
    state.demand[1:].rate = rates
    return snapshot, state


def homes(state: RouterState, v: int) -> list[int]:
    return [int(g) for g in state.homes[v].groups[: state.homes[v].count]]


def stated(snapshot: Snapshot, state: RouterState) -> dict[int, set[int]]:
    """Every variant's homes where each class weighs the same; boundaries may go either way."""
    by_key = [int(g) for g in np.argsort(snapshot.groups.key) if snapshot.groups[g].usable]
    rates = {v: Fraction(float(state.demand[v].rate)) for v in range(1, len(state.homes))}
    total = sum(rates.values(), Fraction(0))
    floor = total * Fraction(COLD) / len(state.homes) if total else Fraction(1)
    order = sorted(rates, key=lambda v: (int(snapshot.variants[0, v].rank_class), v))
    part = (total + floor * len(rates)) / len(by_key)
    found, before = {}, Fraction(0)
    for v in order:
        after = before + rates[v] + floor
        ends = (before, after) if after - before >= Fraction(HOT) * part else ((before + after) / 2,) * 2
        touched = range(int(ends[0] / part), len(by_key))
        found[v] = {by_key[p] for p in touched if p * part < ends[1] or p * part <= ends[0]}
        before = after
    return found


@given(seed=seeds)
def test_a_variant_s_homes_are_the_groups_that_its_share_of_load_touches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, groups = int(rng.integers(1, 60)), int(rng.integers(1, 9))
    classes = [int(c) for c in rng.integers(1, CLASSES, count)]
    rates = [float(rate) for rate in rng.integers(0, 1000, count) * rng.choice([0, 1, 1, 30], count)]
    snapshot, state = plain(groups, classes, rates, seed)
    snapshot.groups.usable[int(rng.integers(groups))] = groups == 1
    place(snapshot, state)
    expected = stated(snapshot, state)
    wrong = [v for v in expected if set(homes(state, v)) != expected[v]]
    assert len(wrong) <= 1, wrong  # one may end just where a part does
    assert homes(state, 0) == []


def test_variants_are_spread_evenly_without_requests() -> None:
    snapshot, state = plain(4, [1] * 100, [0.0] * 100, 3)
    place(snapshot, state)
    numbers = np.bincount([homes(state, v)[0] for v in range(1, 101)])
    assert list(numbers) == [25] * 4
    assert state.clock[0].moves == 0


def test_a_hot_variant_gets_groups_in_proportion_and_gives_them_back() -> None:
    snapshot, state = plain(10, [2] * 50, [1.0] * 50, 3)
    place(snapshot, state)
    before = len(homes(state, 7))
    state.demand[7].rate = 49.0  # as much as all others
    place(snapshot, state)
    hot = homes(state, 7)
    assert len(hot) == len(set(hot))
    assert before == 1
    assert 5 <= len(hot) <= 7
    assert state.clock[0].moves > 0
    state.demand[7].rate = 1.0
    place(snapshot, state)
    assert len(homes(state, 7)) == 1


def test_high_ranks_lie_apart_and_weigh_more_where_kernels_pad() -> None:
    snapshot, state = plain(12, [1] * 300 + [4] * 300, [1.0] * 600, 3)
    snapshot.models.padded_s = 2e-6
    for c in (1, 4):
        state.classes[c].rate_tokens = 300 * 100.0
        state.classes[c].rate_context = 300 * 100.0 * 200
        state.classes[c].rate_promise = 300 * 100.0 * 15e-3
    place(snapshot, state)
    low = {g for v in range(1, 301) for g in homes(state, v)}
    high = {g for v in range(301, 601) for g in homes(state, v)}
    assert len(low & high) <= 1
    # Within 15 ms a group holds 5e-3 / (1e-5 + 2e-6 rank) rows: 192 of rank 8, 36 of rank 64.
    assert abs(len(high) - 12 * 192 / (192 + 36)) <= 1


@given(seed=seeds)
def test_numbers_that_cannot_be_give_homes_that_can(seed: int) -> None:
    asked: World = made_absurd(world(seed), seed)
    place(asked.snapshot, asked.state)
    if asked.usable:
        for v in range(1, len(asked.state.homes)):
            assert 1 <= asked.state.homes[v].count <= MAX_HOMES
            assert set(homes(asked.state, v)) <= set(asked.usable)
