"""Every first and last stage is weighed: nothing that fits is refused, and no better order is missed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.baselines.placement.exact import Exact
from placement.solver.decide import decide
from placement.solver.default_estimator import estimator_of
from placement.solver.policies.base import EstimatorFor
from placement.solver.policies.joint import Joint
from placement.solver.schema import read_scenario
from placement.types import Placement
from testkit.placement_brute_force import best, instance
from testkit.solver_instances import Pausing

TOLERANCE = 0.005


def four_a6000(free_gib: tuple[float, ...]) -> dict[str, Any]:
    """Two large GPUs between which the tables must be shared out, and two that hold two layers each."""
    gpus = [{"type": "A6000", "total_gib": 48, "free_gib": free} for free in free_gib]
    model = {
        **{"layers": 21, "heads": 32, "kv_heads": 8, "hidden_size": 4096, "layer_mib": 400},
        **{
            "kv_bytes_per_token_per_layer": 4096,
            "embedding_mib": 1200,
            "head_mib": 1200,
            "overhead_mib": 300,
        },
    }
    load = {"input_tokens": 64, "output_tokens": 32, "concurrency": 1, "max_tp": 1}
    return {
        "cluster": {"nodes": [{"name": "a", "gpus": gpus}]},
        "deployments": [{"name": "m", "model": model, **load}],
    }


@pytest.mark.parametrize("free_gib", [*itertools.permutations((1.2, 1.2, 5.1, 5.2))][::5])
@pytest.mark.parametrize("policy", [Joint(), Exact()], ids=lambda policy: policy.name)
def test_tables_at_the_ends_are_found_room_for(policy: Joint | Exact, free_gib: tuple[float, ...]) -> None:
    cluster, (request,) = read_scenario(four_a6000(free_gib), Path())
    outcome = decide(cluster, request, policy)
    assert isinstance(outcome, Placement), outcome.reason
    first, *_, last = outcome.ranks
    roomy = {index for index, free in enumerate(free_gib) if free > 5}
    assert {first.device_index, last.device_index} == roomy
    assert max(outcome.plan.layers_per_stage[1:-1]) <= 2


@pytest.mark.parametrize("estimator_for", [estimator_of, Pausing], ids=["roofline", "pausing"])
@pytest.mark.parametrize(
    "seeds",
    [
        range(12),
        pytest.param(range(12, 22), marks=pytest.mark.slow),
        pytest.param(range(22, 80), marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=str,
)
def test_the_result_equals_brute_force_over_all_orders_and_splits(
    seeds: range, estimator_for: EstimatorFor
) -> None:
    """`benchmarks.placement_orders` does it for 10,000."""
    placed = 0
    for seed in seeds:
        cluster, request = instance(random.Random(seed))
        found = Joint().find(cluster, request, estimator_for)
        least = best(cluster, request, estimator_for(cluster, request))
        assert (found is None) == (least is None), f"instance {seed}: {found} where the least is {least}"
        if found is not None and least is not None:
            placed += 1
            assert least * (1 - 1e-9) <= found.choice.objective <= least * (1 + TOLERANCE), seed
    assert placed


@pytest.mark.parametrize("limit", ["ttft_s", "tpot_s"])
def test_a_limit_that_some_order_meets_is_met(limit: str) -> None:
    """The order of the least latency need not be that of the least TTFT."""
    weighed = 0
    for seed in range(40):
        cluster, request = instance(random.Random(seed))
        unlimited = Joint().find(cluster, request)
        if unlimited is None or unlimited.plan.pipeline_parallel < 2:
            continue
        value = unlimited.estimate.ttft_s if limit == "ttft_s" else unlimited.estimate.tpot_s
        tight = replace(request, slos=replace(request.slos, **{limit: value * 0.98}))
        least = best(cluster, tight, estimator_of(cluster, tight))
        found = Joint().find(cluster, tight)
        assert (found is None) == (least is None), f"instance {seed}"
        weighed += 1
        if found is not None and least is not None:
            assert found.choice.objective <= least * (1 + TOLERANCE), seed
    assert weighed


def test_another_order_of_the_same_gpus_is_taken_where_the_fastest_breaks_a_limit() -> None:
    """Two GPUs, one a little busy: the order of less latency has 0.1% too much TTFT, the other 2% less."""
    cluster, request = instance(random.Random(8752))
    request = replace(request, slos=replace(request.slos, ttft_s=0.00612))
    found = Joint().find(cluster, request, Pausing)
    least = best(cluster, request, Pausing(cluster, request))
    assert found is not None
    assert least is not None
    assert found.plan.pipeline_parallel == 2
    assert found.choice.objective == pytest.approx(least)
