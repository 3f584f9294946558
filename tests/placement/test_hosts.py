"""CPU hosts: one carries all ranks, which share its cores and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.baselines.placement.exact import Exact
from controlplane.baselines.placement.maveriq import Maveriq
from placement.solver.cluster import Cluster, Gpu, GpuType, Node
from placement.solver.decide import decide
from placement.solver.layout import after
from placement.solver.outcome import NotPlaced
from placement.solver.policies.base import Policy
from placement.solver.policies.joint import Joint
from placement.solver.request import Request
from placement.types import Constraint, Intent, Placement, Slos
from testkit.solver_instances import GIB, LINKS, model

HOST = GpuType("xeon", 100e9, 2e12, shared=True, kind="cpu")


def hosts(*free_gib: float) -> Cluster:
    nodes = (Node(f"n{n}", (Gpu(0, "xeon", 64 * GIB, round(gib * GIB)),)) for n, gib in enumerate(free_gib))
    return Cluster(tuple(nodes), (HOST,), LINKS)


def request(**changes: object) -> Request:
    """32 layers of 400 MiB, 9 heads that can be split three ways."""
    figures = model(32, 9, 3)
    figures = replace(figures, compressions=figures.compressions[:1])
    return replace(Request("m", figures, concurrency=1), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [Joint(), Maveriq(), Exact()], ids=lambda p: p.name)
@pytest.mark.parametrize("intent", Intent)
def test_splitting_a_model_on_one_host_gains_nothing(policy: Policy, intent: Intent) -> None:
    found = policy.find(hosts(60), request(intent=intent))
    assert found is not None
    assert [(r.node, r.device_kind, r.device_index) for r in found.ranks] == [("n0", "cpu", 0)]


@pytest.mark.parametrize("policy", [Joint(), Maveriq(), Exact()], ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("bounds", "ranks"),
    [({"only_tp": (3,)}, 3), ({"layers": (10, 22)}, 2), ({"only_tp": (3,), "only_pp": (2,)}, 6)],
)
def test_ranks_that_are_asked_for_share_one_host(
    policy: Policy, bounds: dict[str, object], ranks: int
) -> None:
    before, asked = hosts(8, 40, 30), request(**bounds)
    found = policy.find(before, asked)
    assert found is not None
    assert [(r.rank, r.node) for r in found.ranks] == [(n, "n1") for n in range(ranks)]
    assert found.plan.layers_per_stage == asked.layers or found.plan.layers_per_stage in ((32,), (16, 16))
    (node,) = (n for n in after(before, asked, found).nodes if n.name == "n1")
    assert node.gpus[0].free_bytes == 40 * GIB - sum(r.memory_bytes for r in found.ranks)
    assert len(node.gpus[0].residents) == ranks


def test_all_ranks_together_must_fit() -> None:
    """Every rank would fit by itself; the memory of no two hosts is added up."""
    outcome = decide(hosts(9, 9), request(), Joint())
    assert isinstance(outcome, NotPlaced)
    assert outcome.binding is Constraint.MEMORY
    assert "on 2 CPU hosts" in outcome.reason


def test_a_busy_host_is_avoided_and_its_load_counted() -> None:
    nodes = hosts(60, 60).nodes
    busy = replace(nodes[0], gpus=(replace(nodes[0].gpus[0], load=0.5),))
    both = replace(hosts(60, 60), nodes=(busy, nodes[1]))
    found = Joint().find(both, request(intent=Intent.MIN_LATENCY))
    assert found is not None
    assert found.ranks[0].node == "n1"


def test_the_stages_of_one_host_share_its_time() -> None:
    """Two stages of equal length on one host keep up with as many requests as one with all layers."""
    whole, split = (Joint().find(hosts(60), request(only_pp=(pp,), rate_per_s=0.001)) for pp in (1, 2))
    assert whole is not None
    assert split is not None
    assert split.choice.throughput_per_s == pytest.approx(whole.choice.throughput_per_s, rel=0.01)
    assert sum(split.choice.utilisation) == pytest.approx(sum(whole.choice.utilisation), rel=0.01)


def test_gpus_and_hosts_are_not_searched_together() -> None:
    gpu = GpuType("big", 1e12, 1e14)
    with pytest.raises(ValueError, match="got both"):
        Cluster((), (HOST, gpu), LINKS)


def test_an_slo_beyond_any_host_is_offered_what_there_is() -> None:
    outcome = decide(hosts(60), request(slos=Slos(ttft_s=1e-6)), Joint())
    assert isinstance(outcome, NotPlaced)
    (one,) = outcome.relaxations
    assert one.constraint is Constraint.TTFT
    assert isinstance(decide(hosts(60), request(slos=Slos(ttft_s=one.offered)), Joint()), Placement)
