"""Deployments that an older version wrote down are read as what they meant."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from controlplane.state.records import (
    AutoRelax,
    Deployment,
    ExpectedLoad,
    Phase,
    PlanConstraints,
    Scaling,
    ServingTargets,
    dump,
    load,
)
from controlplane.state.terms import LatePolicy, Priority
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import (
    Choice,
    Constraint,
    Intent,
    Placement,
    Plan,
    RankPlacement,
    Relaxation,
    Scope,
    Slos,
)
from profiler.types import Basis, Estimate, Interval

OLD: dict[str, Any] = {
    "model": "base",
    "uid": 3,
    "host": "base",
    "phase": "Deployed",
    "intent": "minCost",
    "max_output_tokens": 128,
    "slos": {"latency_s": 1.5, "ttft_s": None, "tpot_s": None, "cost": 2.5, "accuracy": 90.0},
    "groups": [
        {
            "number": 0,
            "phase": "Serving",
            "placement": {
                "plan": {
                    "tensor_parallel": 1,
                    "layers_per_stage": [30],
                    "quantization": "none",
                    "max_model_len": 2048,
                    "kv_cache_tokens": 32768,
                    "max_variants": 4,
                    "max_lora_rank": 16,
                    "delta_bytes": 0,
                    "full_bytes": 0,
                    "batched_tokens": 2048,
                },
                "ranks": [
                    {
                        "rank": 0,
                        "stage": 0,
                        "tp_rank": 0,
                        "node": "n",
                        "device_index": 0,
                        "device_kind": "cpu",
                        "layer_start": 0,
                        "layer_end": 30,
                        "memory_bytes": 1000,
                    }
                ],
                "estimate": {
                    "ttft_s": 0.1,
                    "tpot_s": 0.01,
                    "memory_bytes": [1000],
                    "accuracy": 100.0,
                    "basis": "rough",
                },
                "reason": "it fits",
            },
        }
    ],
    "reason": "",
    "created_at_s": 1.0,
    "established": True,
    "max_active_variants": None,
}


def test_a_deployment_of_an_older_version() -> None:
    found = load(Deployment, json.dumps(OLD))
    assert found.intent is Intent.MIN_COST
    assert found.slos == Slos(latency_s=1.5, cost=2.5, accuracy=90.0)
    assert found.placement == Placement(
        Plan(1, (30,), "none", 2048, 32768, 4, 16),
        (RankPlacement(0, 0, 0, "n", 0, "cpu", 0, 30, 1000),),
        Estimate(0.1, 0.01, (1000,), 100.0, Basis.ROUGH),
        "it fits",
    )
    assert (found.load, found.constraints, found.auto_relax) == (
        ExpectedLoad(),
        PlanConstraints(),
        AutoRelax(),
    )
    assert found.targets == ServingTargets()
    assert [(g.number, g.phase, g.measured) for g in found.groups] == [(0, GroupPhase.SERVING, ())]
    assert load(Deployment, dump(found)) == found


def test_new_fields_are_read_back_as_written() -> None:
    gave_way = Relaxation(Constraint.TPOT, 0.01, 0.02, 2.0, "raise it")
    choice = Choice(
        1.5, "GiB s", 0.5, 7.0, (0.25,), 3, 4, Interval(1.0, 0.5, 2.0), None, ("a",), ("b",), (gave_way,)
    )
    old = load(Deployment, json.dumps(OLD))
    assert old.placement is not None
    new = replace(
        old,
        intent=Intent.MIN_GPU_HOURS,
        groups=(
            replace(old.groups[0], placement=replace(old.placement, choice=choice)),
            WorkerGroup(3, reason="node n is gone", failures=2, retry_at_s=5.0, refused_on="k"),
        ),
        scaling=Scaling(0, 3, 2.5, 60.0),
        load=ExpectedLoad(1.5, 100, None),
        constraints=PlanConstraints((1, 3), (2,), (10, 20), "g", Scope.NODE),
        auto_relax=AutoRelax(True, 1.5),
        targets=ServingTargets(0.25, None, 9.0, Priority.HIGH, LatePolicy.DROP),
        phase=Phase.PENDING,
    )
    assert load(Deployment, dump(new)) == new
