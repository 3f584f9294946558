"""The decisions of each policy in cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.baselines.placement.exact import Exact
from controlplane.baselines.placement.maveriq import Maveriq, Selection
from controlplane.baselines.placement.registry import PolicyName, policy
from placement.solver.cluster import Cluster, Gpu, Link, Node, Resident, load_of
from placement.solver.decide import decide
from placement.solver.layout import Layout, Search, placed, plan_of
from placement.solver.outcome import NotPlaced, Outcome
from placement.solver.plan import CandidatePlan, Shape, Stage
from placement.solver.policies.joint import Joint
from placement.solver.request import Request
from placement.solver.roofline import Roofline
from placement.solver.view import view_of
from placement.solver.whatif import what_if
from placement.types import Constraint, CostMeasure, Intent, Placement, Scope, Slos
from testkit.solver_instances import GIB, LINKS, TYPES, Pausing, model


def cluster(*nodes: tuple[float, ...], loads: tuple[float, ...] = (), gpus_per_domain: int = 8) -> Cluster:
    """GiB free of 48 on each GPU of each node."""
    made, number = [], 0
    for name, free in enumerate(nodes):
        gpus = []
        for index, gib in enumerate(free):
            load = loads[number] if number < len(loads) else 0.0
            gpus.append(Gpu(index, "big", 48 * GIB, round(gib * GIB), load, index // gpus_per_domain))
            number += 1
        made.append(Node(f"n{name}", tuple(gpus)))
    return Cluster(tuple(made), TYPES, LINKS)


def request(**changes: object) -> Request:
    """A 16 GiB model: 32 layers of 500 MiB; one sequence."""
    figures = model(32, layer_bytes=500 * 2**20)
    figures = replace(figures, compressions=figures.compressions[:1])
    asked = Request("m", figures, concurrency=1, max_tp=1, max_pp=4)
    return replace(asked, **changes)  # type: ignore[arg-type]


def seats(outcome: Outcome | None) -> list[tuple[str, int]]:
    assert isinstance(outcome, Placement), outcome
    return [(seat.node, seat.device_index) for seat in outcome.ranks]


@pytest.mark.parametrize("chosen", [Joint(), Maveriq(), Exact()], ids=lambda p: p.name)
def test_an_uneven_split_hosts_what_no_even_one_can(chosen: Joint | Maveriq | Exact) -> None:
    fragments = cluster((14, 5))
    asked = request(max_pp=2)
    outcome = chosen.find(fragments, asked)
    assert outcome is not None
    big, small = (
        outcome.plan.layers_per_stage
        if seats(outcome)[0] == ("n0", 0)
        else outcome.plan.layers_per_stage[::-1]
    )
    assert big > small
    assert Maveriq(uneven=False).find(fragments, asked) is None
    assert Joint(uneven=False).find(fragments, asked) is None
    assert Joint(uneven=False).find(cluster((14, 14)), asked) is not None


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((21.5, 12.5), (20, 12)),  # by turns until the second is full
        ((26.5, 8.5), (25, 7)),  # runtime and head leave room for 7 layers where 8 blocks would fit
    ],
)
def test_round_robin_gives_blocks_while_the_stage_has_room(
    blocks: tuple[float, float], expected: tuple[int, int]
) -> None:
    layer = 500 + 640 * 4096 / 2**20  # MiB, with its KV cache
    block = (32 * layer + 2 * 250 + 100 + 2 * 512) / 32 / 1024  # GiB, by the paper's equation
    outcome = Maveriq().find(cluster((blocks[0] * block, blocks[1] * block)), request(max_pp=2))
    assert outcome is not None
    assert outcome.plan.layers_per_stage == expected


@pytest.mark.parametrize(
    ("selection", "expected"),
    [(Selection.HYBRID, 1), (Selection.PACKING, 2), (Selection.LEAST_LOADED, 0)],
)
def test_the_paper_s_selections_are_found(selection: Selection, expected: int) -> None:
    """Loads 0.1, 0.6, 0.8 and 1: hybrid packs below 0.7, packing below 1."""
    loaded = cluster((40, 40, 40, 40), loads=(0.1, 0.6, 0.8, 1.0))
    assert seats(Maveriq(selection).find(loaded, request(max_pp=1))) == [("n0", expected)]


def test_hybrid_takes_the_least_loaded_when_all_are_beyond_theta() -> None:
    loaded = cluster((40, 40), loads=(0.9, 0.8))
    assert seats(Maveriq().find(loaded, request(max_pp=1))) == [("n0", 1)]
    assert seats(Maveriq(theta=0.85).find(cluster((40, 40), loads=(0.8, 0.2)), request(max_pp=1))) == [
        ("n0", 0)
    ]


def test_load_is_the_share_of_busy_seconds_in_the_window() -> None:
    assert load_of([1.0] * 100 + [0.5] * 30 + [0.01] * 90) == pytest.approx(30 / 120)
    assert load_of([0.2, 0.0], window=120) == 0.5
    assert load_of([]) == 0.0


def test_ours_takes_the_fragment_that_fits_and_leaves_the_empty_gpu_whole() -> None:
    assert seats(Joint().find(cluster((48, 20, 48)), request(max_pp=1))) == [("n0", 1)]


def test_ours_avoids_a_busy_gpu_when_asked_for_latency() -> None:
    busy = cluster((20, 48), loads=(0.5, 0.0))
    assert seats(Joint().find(busy, request(max_pp=1, intent=Intent.MIN_LATENCY))) == [("n0", 1)]


def test_adjacent_stages_are_kept_on_fast_links() -> None:
    pairs = cluster((10, 1, 10, 10), gpus_per_domain=2)
    assert seats(Joint().find(pairs, request(max_pp=2))) in ([("n0", 2), ("n0", 3)], [("n0", 3), ("n0", 2)])
    nodes = cluster((10, 1), (10, 10))
    assert {node for node, _ in seats(Joint().find(nodes, request(max_pp=2)))} == {"n1"}


def test_tensor_parallel_groups_stay_on_one_node() -> None:
    asked = request(max_tp=2, max_pp=1)
    assert Joint().find(cluster((10,), (10,)), asked) is None
    assert len(seats(Joint().find(cluster((10, 10)), asked))) == 2


def test_under_load_the_slowest_stage_is_what_counts() -> None:
    """Two GPUs, the first three times as slow: layers go to the fast one; under load both are busy."""
    uneven = cluster((20, 20), loads=(2 / 3, 0.0))
    asked = request(max_pp=2, concurrency=64, input_tokens=16, output_tokens=64)
    view = view_of(uneven, asked)
    shape = Shape(asked.model.compressions[0], 1, 2)

    def tpot(layers: tuple[int, int], rate: float) -> float:
        loaded = replace(asked, rate_per_s=rate)
        layout = Layout(shape, ((0,), (1,)), layers)
        return Roofline(uneven, loaded)(plan_of(view, layout)).tpot_s

    assert tpot((1, 31), 0.0) < tpot((16, 16), 0.0)
    assert tpot((8, 24), 20.0) < tpot((1, 31), 20.0) < tpot((16, 16), 20.0)


def test_two_groups_in_flight_wait_for_the_slowest_stage() -> None:
    """A token of two groups takes the longer of both stages' sum and twice the slowest: by hand."""
    free, asked = cluster((48, 48)), request(max_pp=2, rate_per_s=50.0, concurrency=8)
    estimator = Roofline(free, asked)
    shape = Shape(asked.model.compressions[0], 1, 2)
    rates = estimator.rates(shape, "big", Link.FAST)
    assert estimator.groups(shape) == 2
    figures = estimator(CandidatePlan(shape, (Stage(10, "big"), Stage(22, "big")), (Link.FAST,)))
    assert figures.tpot_s == pytest.approx(2 * (22 * rates.decode_layer_s + rates.decode_rest_s))


def test_a_stage_pauses_between_two_groups() -> None:
    """The last stage is excepted, whose pause is part of its work outside layers; with one group no stage
    waits for it."""
    free = cluster((48, 48))
    several = Pausing(free, request(max_pp=2, rate_per_s=50.0, concurrency=8))
    shape = Shape(request().model.compressions[0], 1, 2)
    rates, stages = several.rates(shape, "big", Link.FAST), (Stage(22, "big"), Stage(10, "big"))
    assert rates.decode_gap_s > 0
    figures = several(CandidatePlan(shape, stages, (Link.FAST,)))
    assert figures.tpot_s == pytest.approx(2 * (22 * rates.decode_layer_s + rates.decode_gap_s))
    alone = Pausing(free, request(max_pp=2))
    rates = alone.rates(shape, "big", Link.FAST)
    figures = alone(CandidatePlan(shape, stages, (Link.FAST,)))
    hop_s = alone.hop_s(shape, Link.FAST).token
    assert figures.tpot_s == pytest.approx(32 * rates.decode_layer_s + rates.decode_rest_s + hop_s)


def test_a_split_knows_of_the_pauses_of_all_stages() -> None:
    """The best of all splits; if only the last stage paused it would have fewer layers."""
    free = cluster((48, 48))
    asked = request(intent=Intent.MIN_LATENCY, max_pp=2, only_pp=(2,), rate_per_s=4.0, concurrency=8)
    estimator, shape = Pausing(free, asked), Shape(asked.model.compressions[0], 1, 2)
    latencies = {
        (n, 32 - n): estimator(
            CandidatePlan(shape, (Stage(n, "big"), Stage(32 - n, "big")), (Link.FAST,))
        ).latency_s
        for n in range(1, 32)
    }
    for chosen in (Joint(), Exact()):
        found = chosen.find(free, asked, Pausing)
        assert found is not None
        split = found.plan.layers_per_stage
        assert latencies[split[0], split[1]] == pytest.approx(min(latencies.values()))


def test_a_refusal_names_the_binding_limit_and_a_feasible_value() -> None:
    free = cluster((48, 48))
    slow = decide(free, request(slos=Slos(latency_s=0.01)), Joint())
    assert isinstance(slow, NotPlaced)
    assert slow.binding is Constraint.LATENCY
    offered = slow.relaxations[0].offered
    assert slow.relaxations[0].factor == pytest.approx(offered / 0.01)
    assert isinstance(decide(free, request(slos=Slos(latency_s=offered)), Joint()), Placement)
    dear = decide(free, request(slos=Slos(cost=0.01)), Joint())
    assert isinstance(dear, NotPlaced)
    assert dear.binding is Constraint.COST
    full = decide(cluster((5, 5)), request(), Joint())
    assert isinstance(full, NotPlaced)
    assert full.binding is Constraint.MEMORY
    assert "10.00 GiB are free on 2 GPUs" in full.reason


def test_accuracy_binds_where_only_a_compressed_model_fits() -> None:
    asked = replace(request(max_pp=1), model=model(32, layer_bytes=500 * 2**20), slos=Slos(accuracy=0.95))
    outcome = decide(cluster((8,)), asked, Joint())
    assert isinstance(outcome, NotPlaced)
    assert (outcome.binding, outcome.relaxations[0].offered) == (Constraint.ACCURACY, 0.9)


def test_headroom_and_anti_affinity_bind() -> None:
    tight = decide(cluster((18,)), request(max_pp=1, headroom=0.1), Joint())
    assert isinstance(tight, NotPlaced)
    assert tight.binding is Constraint.HEADROOM
    copies = [request(name=f"m-{n}", max_pp=1, group="m", scope=Scope.NODE) for n in (1, 2, 3)]
    found = what_if(cluster((48, 48), (48,)), copies, Joint())
    assert len({seats(outcome)[0][0] for _, outcome in found.placed}) == 2
    assert [missed.binding for missed in found.not_placed] == [Constraint.ANTI_AFFINITY]


@pytest.mark.parametrize("first", Scope)
@pytest.mark.parametrize("second", Scope)
def test_the_stricter_of_two_anti_affinities_holds_in_any_order(first: Scope, second: Scope) -> None:
    """On one GPU, on two of a node and on two nodes: where both fit follows from the definition."""
    copies = [
        request(name="m-1", max_pp=1, group="m", scope=first),
        request(name="m-2", max_pp=1, group="m", scope=second),
    ]
    for nodes, apart in ((((48,),), Scope.NONE), (((48, 48),), Scope.GPU), (((48,), (48,)), Scope.NODE)):
        found = what_if(cluster(*nodes), copies, Joint())
        order = (Scope.NONE, Scope.GPU, Scope.NODE)
        fits = max(map(order.index, (first, second))) <= order.index(apart)
        assert [len(found.placed), len(found.not_placed)] == ([2, 0] if fits else [1, 1])
        for missed in found.not_placed:
            assert missed.binding is Constraint.ANTI_AFFINITY


def test_the_stricter_anti_affinity_is_none_of_other_groups() -> None:
    first = request(name="a", max_pp=1, group="a", scope=Scope.NODE)
    for second in (replace(first, name="b", group="b"), request(name="b", max_pp=1)):
        assert len(what_if(cluster((48,)), [first, second], Joint()).placed) == 2


def test_a_rate_beyond_one_copy_is_named() -> None:
    outcome = decide(cluster((48,)), request(rate_per_s=1e4), Joint())
    assert isinstance(outcome, NotPlaced)
    assert outcome.binding is Constraint.RATE
    lower = request(rate_per_s=outcome.relaxations[0].offered)
    assert isinstance(decide(cluster((48,)), lower, Joint()), Placement)


@pytest.mark.parametrize(
    ("goal", "measure"),
    [
        *((goal, CostMeasure.MEMORY_LATENCY) for goal in Intent),
        (Intent.MIN_COST, CostMeasure.MEMORY),
        (Intent.MIN_COST, CostMeasure.GPU_HOURS),
    ],
)
def test_every_intent_minimises_its_own_figure(goal: Intent, measure: CostMeasure) -> None:
    asked = replace(request(max_tp=2, max_pp=2, intent=goal, cost=measure), model=model(24))
    free = cluster((48, 48))
    ours, best = Joint().find(free, asked), Exact().find(free, asked)
    assert ours is not None
    assert best is not None
    assert ours.choice.objective <= best.choice.objective * 1.01


def test_a_what_if_plan_takes_only_the_memory_of_its_placements() -> None:
    empty = cluster((20, 48))
    found = what_if(empty, [request(name="a"), request(name="b", max_pp=1), request(name="c")], Joint())
    used = sum(seat.memory_bytes for _, outcome in found.placed for seat in outcome.ranks)
    free = sum(gpu.free_bytes for node in found.cluster.nodes for gpu in node.gpus)
    assert free + used == 68 * GIB
    assert all(gpu.free_bytes in (20 * GIB, 48 * GIB) for node in empty.nodes for gpu in node.gpus)
    held: list[Resident] = [r for node in found.cluster.nodes for gpu in node.gpus for r in gpu.residents]
    assert {r.deployment for r in held} == {request.name for request, _ in found.placed}


@pytest.mark.parametrize("name", PolicyName)
def test_an_empty_cluster_is_no_place(name: PolicyName) -> None:
    outcome = decide(Cluster((), TYPES, LINKS), request(), policy(name))
    assert isinstance(outcome, NotPlaced)
    assert "no GPU" in outcome.reason


def test_ranks_are_listed_by_stage() -> None:
    free, asked = cluster((48, 48, 48, 48)), request(max_tp=2)
    view = view_of(free, asked)
    shape = Shape(asked.model.compressions[0], 2, 2)
    layout = Layout(shape, ((2, 3), (0, 1)), (20, 12))
    outcome = placed(asked, view, layout, Roofline(free, asked), Search(1, 1))
    assert [(s.rank, s.stage, s.tp_rank, s.device_index) for s in outcome.ranks] == [
        (0, 0, 0, 2),
        (1, 0, 1, 3),
        (2, 1, 0, 0),
        (3, 1, 1, 1),
    ]
    assert [(s.layer_start, s.layer_end) for s in outcome.ranks] == [(0, 20), (0, 20), (20, 32), (20, 32)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"type": "B9"}, "unknown type 'B9'"),
        ({"free_bytes": 49 * GIB}, "0 <= free <= total"),
        ({"load": 1.5}, "0 to 1"),
    ],
)
def test_impossible_clusters_are_refused(changed: dict[str, object], message: str) -> None:
    gpu = replace(Gpu(0, "big", 48 * GIB, 48 * GIB), **changed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Cluster((Node("a", (gpu,)),), TYPES, LINKS)
