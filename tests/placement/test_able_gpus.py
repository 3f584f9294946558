"""Plans in fp8 are for GPUs that have it, also where others are faster, or emptier."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from controlplane.baselines.placement.registry import PolicyName, policy
from placement.solver.schema import read_scenario
from placement.solver.whatif import WhatIf, what_if
from placement.types import Constraint


def solved(
    gpus: dict[str, int],
    compressions: dict[str, float],
    name: PolicyName = PolicyName.OSTINATO,
    **others: Any,
) -> WhatIf:
    """A model of 26 GiB, or 13 in fp8, on nodes with a number of GPUs of one type each."""
    figures = {"layers": 26, "heads": 32, "kv_heads": 8, "hidden_size": 4096, "layer_mib": 1024}
    sizes = {"none": 1.0, "fp8": 0.5}
    document = {
        "cluster": {
            "nodes": [
                {"name": kind, "gpus": [{"type": kind, "count": count, "total_gib": 80}]}
                for kind, count in gpus.items()
            ]
        },
        "deployments": [
            {
                "name": "chat",
                "model": {
                    **figures,
                    "kv_bytes_per_token_per_layer": 4096,
                    "compressions": {
                        name: {"accuracy": accuracy, "share": sizes[name]}
                        for name, accuracy in compressions.items()
                    },
                },
                **others,
            }
        ],
    }
    cluster, requests = read_scenario(document, Path())
    return what_if(cluster, requests, policy(name))


@pytest.mark.parametrize("name", PolicyName)
@pytest.mark.parametrize("intent", ["minCost", "minLat", "minMem", "minGpuHours"])
def test_no_plan_in_fp8_is_on_a_gpu_without_it(name: PolicyName, intent: str) -> None:
    kinds = ("A100-80GB", "L40S", "A10")
    for some in itertools.chain.from_iterable(itertools.combinations(kinds, n) for n in (1, 2, 3)):
        found = solved(dict.fromkeys(some, 2), {"none": 1.0, "fp8": 0.99}, name, intent=intent)
        ((_, placed),) = found.placed
        assert placed.plan.quantization == "none" or {rank.node for rank in placed.ranks} == {"L40S"}


def test_each_compression_is_looked_at_where_it_runs() -> None:
    """The least memory is fp8 on an L40S; the least latency bfloat16 on two A100s, which read faster."""
    both = {"none": 1.0, "fp8": 0.99}
    ((_, small),) = solved({"A100-80GB": 2, "L40S": 1}, both, intent="minMem").placed
    assert (small.plan.quantization, {rank.node for rank in small.ranks}) == ("fp8", {"L40S"})
    ((_, quick),) = solved({"A100-80GB": 2, "L40S": 1}, both, intent="minLat").placed
    assert (quick.plan.quantization, {rank.node for rank in quick.ranks}) == ("none", {"A100-80GB"})


def test_one_type_that_runs_all_is_searched_as_ever() -> None:
    ((_, placed),) = solved({"H100": 1}, {"none": 1.0, "fp8": 0.99}, intent="minMem").placed
    assert placed.plan.quantization == "fp8"


def test_a_refusal_says_that_no_gpu_runs_the_model() -> None:
    (missed,) = solved({"A100-80GB": 1}, {"fp8": 0.99}).not_placed
    assert missed.binding is Constraint.COMPRESSION
    assert "fp8 needs GPUs of compute capability 8.9 or higher, but A100-80GB has 8.0" in missed.reason
    assert "such as none" in missed.reason


def test_a_limit_that_only_fp8_would_keep_names_what_the_others_reach() -> None:
    found = solved({"A100-80GB": 1}, {"none": 1.0, "fp8": 0.99}, intent="minMem", slos={"tpot_s": 0.008})
    (missed,) = found.not_placed
    assert missed.binding is Constraint.TPOT


def test_a_group_is_apart_from_what_lies_on_gpus_that_it_cannot_use() -> None:
    """Two copies that must not share a node: the second one, in fp8, is not put on the first one's node."""
    found = solved(
        {"L40S": 2}, {"fp8": 0.99}, intent="minMem", copies=2, anti_affinity="node", max_tp=1, max_pp=1
    )
    assert len(found.placed) == 1
