"""Placing, against brute force over every seating of small clusters."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from placement.place import place, place_best
from placement.types import Candidate, Device, Infeasible, Inventory, Placement, Plan
from profiler.types import DeviceRates, Estimate

RATES = DeviceRates(1e9, 1e9)


def device(node: str, index: int, free: int, kind: str = "gpu") -> Device:
    return Device(node, index, kind, 100, free, RATES)


def candidate(tp: int, stage_bytes: tuple[int, ...]) -> Candidate:
    """A plan of `tp` equal ranks per stage, two layers per stage."""
    memory = tuple(size for size in stage_bytes for _ in range(tp))
    return Candidate(Plan(tp, (2,) * len(stage_bytes), "none", 64, 64, 1, 8), Estimate(0.1, 0.1, memory, 1.0))


CANDIDATES = st.builds(
    candidate, st.integers(1, 2), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    spots = draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["gpu", "gpu", "cpu"])), max_size=6)
    )
    free = draw(st.lists(st.integers(0, 20), min_size=len(spots), max_size=len(spots)))
    return Inventory(
        tuple(
            device(node, i, size, kind)
            for i, ((node, kind), size) in enumerate(zip(spots, free, strict=True))
        )
    )


def seatable(c: Candidate, inventory: Inventory) -> bool:
    """By trial of everything: one CPU for all, or distinct GPUs with each stage on one node."""
    sizes, tp = c.estimate.memory_bytes, c.plan.tensor_parallel
    if any(d.kind == "cpu" and d.free_bytes >= sum(sizes) for d in inventory.devices):
        return True
    gpus = [d for d in inventory.devices if d.kind == "gpu"]
    return any(
        all(d.free_bytes >= size for d, size in zip(seats, sizes, strict=True))
        and all(len({d.node for d in seats[at : at + tp]}) == 1 for at in range(0, len(sizes), tp))
        for seats in itertools.permutations(gpus, len(sizes))
    )


def check(placed: Placement, c: Candidate, inventory: Inventory) -> None:
    free = {(d.node, d.kind, d.index): d.free_bytes for d in inventory.devices}
    used: Counter[tuple[str, str, int]] = Counter()
    for rank in placed.ranks:
        used[rank.node, rank.device_kind, rank.device_index] += rank.memory_bytes
    assert all(used[key] <= free[key] for key in used)
    assert [r.rank for r in placed.ranks] == list(range(c.plan.world_size))
    assert tuple(r.memory_bytes for r in placed.ranks) == c.estimate.memory_bytes
    assert len({r.device_kind for r in placed.ranks}) == 1
    for rank in placed.ranks:
        assert (rank.stage, rank.tp_rank) == divmod(rank.rank, c.plan.tensor_parallel)
        assert (rank.layer_start, rank.layer_end) == (2 * rank.stage, 2 * rank.stage + 2)
    for stage in range(c.plan.pipeline_parallel):
        assert len({r.node for r in placed.ranks if r.stage == stage}) == 1
    if placed.ranks[0].device_kind != "cpu":
        assert len(used) == c.plan.world_size


@settings(max_examples=200)
@given(c=CANDIDATES, inventory=inventories())
def test_a_seating_is_found_whenever_there_is_one(c: Candidate, inventory: Inventory) -> None:
    before = copy.deepcopy((c, inventory))
    outcome = place(c, inventory)
    assert isinstance(outcome, Placement) == seatable(c, inventory)
    assert (c, inventory) == before
    assert outcome == place(c, Inventory(inventory.devices[::-1]))
    if isinstance(outcome, Placement):
        check(outcome, c, inventory)
    else:
        assert outcome.reason
        assert outcome.relaxations


@given(ranked=st.lists(CANDIDATES, max_size=4), inventory=inventories())
def test_the_first_that_fits_is_placed(ranked: list[Candidate], inventory: Inventory) -> None:
    outcome = place_best(ranked, inventory)
    fitting = [c for c in ranked if seatable(c, inventory)]
    if fitting:
        assert isinstance(outcome, Placement)
        assert (outcome.plan, outcome.estimate) == (fitting[0].plan, fitting[0].estimate)
    else:
        assert isinstance(outcome, Infeasible)


@given(cs=st.lists(CANDIDATES, max_size=6), inventory=inventories())
def test_one_after_another_never_over_commits(cs: list[Candidate], inventory: Inventory) -> None:
    taken: Counter[tuple[str, str, int]] = Counter()
    for c in cs:
        outcome = place(c, inventory, taken)
        if isinstance(outcome, Placement):
            for r in outcome.ranks:
                taken[r.node, r.device_kind, r.device_index] += r.memory_bytes
    free = {(d.node, d.kind, d.index): d.free_bytes for d in inventory.devices}
    assert all(taken[key] <= free[key] for key in taken)


def seats(outcome: Placement | Infeasible) -> list[tuple[str, int]]:
    assert isinstance(outcome, Placement), outcome
    return [(r.node, r.device_index) for r in outcome.ranks]


def test_most_free_first_and_one_node_when_it_can() -> None:
    cluster = Inventory((device("a", 0, 5), device("a", 1, 9), device("b", 0, 8), device("b", 1, 2)))
    assert seats(place(candidate(1, (5,)), cluster)) == [("a", 1)]
    assert seats(place(candidate(1, (4, 4)), cluster)) == [("a", 1), ("a", 0)]
    assert seats(place(candidate(1, (6, 8)), cluster)) == [("b", 0), ("a", 1)]
    assert seats(place(candidate(2, (2, 2)), cluster)) == [("a", 1), ("a", 0), ("b", 0), ("b", 1)]


def test_a_cpu_host_holds_all_ranks_or_none() -> None:
    host = Inventory((device("a", 0, 10, "cpu"),))
    assert seats(place(candidate(1, (5, 5)), host)) == [("a", 0), ("a", 0)]
    outcome = place(candidate(1, (5, 6)), host)
    assert isinstance(outcome, Infeasible)
    split = Inventory((device("a", 0, 10, "cpu"), device("b", 0, 10, "cpu")))
    assert isinstance(place(candidate(1, (8, 8)), split), Infeasible)
    assert isinstance(place(candidate(1, (5,)), host, {("a", "cpu", 0): 6}), Infeasible)


def test_reasons_read_well() -> None:
    gib = 2**30
    cluster = Inventory((device("a", 0, 8 * gib),))
    first, second = candidate(1, (9 * gib,)), candidate(1, (6 * gib,))
    placed = place_best([first, second], cluster)
    assert placed.reason == (
        "TP=1 x PP=1 on gpu 0 of a: 6.00 of 8.00 GiB free; predicted roughly, without a profile: "
        "TTFT 100 ms, TPOT 100 ms (choice 2 of 2; better ones do not fit)"
    )
    host = Inventory((device("a", 0, 8 * gib, "cpu"),))
    many_small_ranks = candidate(1, (5 * gib, 5 * gib))
    nearest = place_best([many_small_ranks, first], host)
    assert isinstance(nearest, Infeasible)
    assert nearest.relaxations[0] == "free 1.00 GiB on cpu 0 of a"
    refused = place(first, cluster)
    assert isinstance(refused, Infeasible)
    assert "9.00 GiB" in refused.reason
    assert "8.00 on gpu 0 of a" in refused.reason
    assert isinstance(place(first, Inventory(())), Infeasible)
