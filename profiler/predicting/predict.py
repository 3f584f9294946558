"""The cost of plans under a load, with an interval for each figure. Pure.

If this architecture was measured on this kind of device (a `Calibration`), the physical model computes the
cost. Otherwise the roofline of `profiler.roofline` does, and the prediction says so (`Basis.ROUGH`). A TP
without measurements is scaled from the nearest measured TP by the ratio of their rooflines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from profiler.physical.variants import VariantLoad, variant_load
from profiler.predicting.checks import check_degree, check_load, check_plan, check_quantization, check_split
from profiler.predicting.intervals import inverse
from profiler.predicting.memory import Memory, kv_capacity
from profiler.predicting.serving import served
from profiler.predicting.times import Times, times_of
from profiler.predicting.types import Ground, Prediction, RankCost
from profiler.quantization import canonical
from profiler.request_path import counts_together
from profiler.types import ModelSpec, Plan, Workload
from profiler.variants.types import VariantSpec

__all__ = [
    "Ground",
    "Prediction",
    "RankCost",
    "check",
    "check_plan",
    "predict",
    "predict_all",
]

Mix = Sequence[VariantSpec | None]


def predict(ground: Ground, plan: Plan, workload: Workload, mix: Mix = ()) -> Prediction:
    """The cost of `plan` under `workload`; its requests use the members of `mix` in turn (None: the base).

    Raises PlanError for a plan or load that makes no sense for the model.
    """
    check(ground.spec, plan, workload)
    plan = _canonical(plan)
    if ground.path is None:
        return _of_engine(ground, plan, workload, mix)
    alone = {
        count: _of_engine(ground, plan, dataclasses.replace(workload, batch=count), mix)
        for count in counts_together(workload.batch)
    }
    return served(ground.path, workload, alone)


def _of_engine(ground: Ground, plan: Plan, workload: Workload, mix: Mix) -> Prediction:
    load = variant_load(ground.spec, mix, workload.batch, ground.launched)
    (times,) = times_of(ground, [plan], workload, load)
    return _prediction(plan, workload, load, times, Memory(ground, _tokens(workload)), ground.free_bytes)


def predict_all(ground: Ground, plans: Sequence[Plan], workload: Workload, mix: Mix = ()) -> list[Prediction]:
    """`predict` for each of many plans, for their engines alone, without the request path. Each rank of a
    plan has a device like the first one of `ground`.

    Work that plans share is done once: 10,000 plans take less than a second with a calibration. Raises
    PlanError.
    """
    check_load(ground.spec, workload)
    _check_all(ground.spec, plans)
    plans = list(map(_canonical, plans))
    load = variant_load(ground.spec, mix, workload.batch, ground.launched)
    memory, free = Memory(ground, _tokens(workload)), ground.free_bytes[:1]
    all_times = _times_of_all(ground, plans, workload, load)
    return [
        _prediction(plan, workload, load, times, memory, free * plan.world_size)
        for plan, times in zip(plans, all_times, strict=True)
    ]


def check(spec: ModelSpec, plan: Plan, workload: Workload) -> None:
    """Check a plan and a load. Raises PlanError, naming the field."""
    check_plan(spec, plan)
    check_load(spec, workload)


def _check_all(spec: ModelSpec, plans: Sequence[Plan]) -> None:
    for degree, quantization in dict.fromkeys((plan.tensor_parallel, plan.quantization) for plan in plans):
        check_quantization(spec, quantization)
        check_degree(spec, degree, quantization)
    for plan in plans:
        check_split(spec, plan)


def _times_of_all(
    ground: Ground, plans: Sequence[Plan], workload: Workload, load: VariantLoad
) -> list[Times]:
    if ground.calibration is not None:
        return times_of(ground, plans, workload, load)
    times = []
    for plan in plans:
        alike = dataclasses.replace(ground, rates=ground.rates[:1] * plan.world_size)
        times += times_of(alike, [plan], workload, load)
    return times


def _canonical(plan: Plan) -> Plan:
    named = canonical(plan.quantization)
    return plan if named == plan.quantization else dataclasses.replace(plan, quantization=named)


def _tokens(workload: Workload) -> int:
    return workload.batch * (workload.input_tokens + workload.output_tokens)


def _prediction(
    plan: Plan,
    workload: Workload,
    load: VariantLoad,
    times: Times,
    memory: Memory,
    free_bytes: Sequence[int],
) -> Prediction:
    ranks = memory.ranks(plan)
    capacity = kv_capacity(ranks, _tokens(workload), free_bytes)
    length = workload.input_tokens + workload.output_tokens
    return Prediction(
        ttft_s=times.ttft,
        tpot_s=times.tpot,
        ttft_last_s=times.ttft_last,
        step_s=times.step,
        latency_s=times.latency,
        tokens_per_s=inverse(workload.batch * workload.output_tokens, times.latency),
        ranks=ranks,
        kv_capacity_tokens=capacity,
        concurrency=None if capacity is None else capacity // length,
        basis=times.basis,
        variants=load,
        notes=times.notes,
    )
