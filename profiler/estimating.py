"""What a plan costs under a load, with an interval for each figure. Pure: a function of what is known.

Where this architecture was measured on this kind of device (a `Calibration`), the physical model answers;
elsewhere the roofline of `profiler.estimate` does, and the prediction says so (`Basis.ROUGH`). A TP that was
not measured is the nearest that was, times the ratio that the roofline sees between the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiler.errors import PlanError
from profiler.estimate import RUNTIME_BYTES, allowance_bytes, estimate, stage_weight_bytes, variant_bytes
from profiler.physical.calibration import Calibration, Cut
from profiler.physical.memory import RankBytes, rank_bytes
from profiler.physical.pipeline import latency
from profiler.physical.variants import VariantLoad, VariantTime, decode_time, prefill_time, variant_load
from profiler.plans import ALIASES, UNCOMPRESSED
from profiler.shards import kv_bytes_per_token, tp_problem
from profiler.types import Basis, DeviceRates, Estimate, Interval, ModelSpec, Plan, Workload
from profiler.variants.types import VariantSpec

# Widths of intervals, as shares of a figure. The fit's own error is measured; how fast certainty is lost away
# from what was measured is assumed, until the errors against whole models on GPUs are known.
NINE_IN_TEN = 1.645  # standard deviations
NOISE = 0.03  # of repeated runs
PER_DOUBLING = 0.10  # of the work beyond the largest measured, or of TP away from the nearest measured
PER_STAGE = 0.03  # of a pipeline
ROUGH_FACTOR = 3.0  # a roofline knows no launches and no caches
MEASURED_MEMORY, ALLOWED_MEMORY = 0.10, 0.60  # of what is not weights or KV cache

MAX_COUNT = 1_000_000  # of a batch, and of its tokens


@dataclass(frozen=True)
class Ground:
    """What is known when a plan is estimated. `rates` has one entry per rank (see `profiler.estimate`).

    `free_bytes`, by rank, is what its device has left for it; empty: no capacity is told. `shared`: so many
    ranks run on one device.
    """

    spec: ModelSpec
    rates: tuple[DeviceRates, ...]
    calibration: Calibration | None = None
    free_bytes: tuple[int, ...] = ()
    shared: int = 1


@dataclass(frozen=True)
class RankCost:
    """Bytes on one rank. `kv_cache` is that of the load's own tokens, `total` everything."""

    weights: int
    activations: int
    graphs: int
    runtime: int
    variants: int
    kv_cache: int
    total: Interval


@dataclass(frozen=True)
class Prediction:
    """`workload.batch` requests that arrive at once at an idle engine. Seconds; tokens are output tokens.

    `ttft_s` is the mean over them, `latency_s` until the last ends. `kv_capacity_tokens` is what the
    devices' free memory can hold beside the rest, `concurrency` how many such requests that is; None where
    no free memory was told. `notes` say what was not measured.
    """

    ttft_s: Interval
    tpot_s: Interval
    latency_s: Interval
    tokens_per_s: Interval
    ranks: tuple[RankCost, ...]
    kv_capacity_tokens: int | None
    concurrency: int | None
    basis: Basis
    variants: VariantLoad
    notes: tuple[str, ...] = ()


def predict(
    ground: Ground, plan: Plan, workload: Workload, mix: Sequence[VariantSpec | None] = ()
) -> Prediction:
    """The cost of `plan` under `workload`, whose requests ask the members of `mix` in turn (None: the base).

    Raises PlanError for a plan or load that makes no sense for the model.
    """
    check(ground.spec, plan, workload)
    plan = dataclasses.replace(plan, quantization=UNCOMPRESSED)
    load = variant_load(ground.spec, mix, workload.batch)
    times = _physical(ground, plan, workload, load) if ground.calibration else _rough(ground, plan, workload)
    ranks = _ranks(ground, plan, workload)
    capacity = _kv_capacity(ranks, ground.free_bytes, ground.spec, plan)
    return Prediction(
        ttft_s=times.ttft,
        tpot_s=times.tpot,
        latency_s=times.latency,
        tokens_per_s=_inverse(workload.batch * workload.output_tokens, times.latency),
        ranks=ranks,
        kv_capacity_tokens=capacity,
        concurrency=None
        if capacity is None
        else capacity // (workload.input_tokens + workload.output_tokens),
        basis=times.basis,
        variants=load,
        notes=times.notes,
    )


def plan_estimate(ground: Ground, plan: Plan, workload: Workload, accuracy: float) -> Estimate:
    """What choosing and placing need of a prediction: one figure each, memory with the plan's whole cache."""
    if ground.calibration is None:
        return estimate(ground.spec, plan, ground.rates, workload, accuracy)
    check_plan(ground.spec, plan)
    times = _physical(ground, plan, workload, VariantLoad())
    parts = _parts(ground, plan)
    variants = _variants(ground.spec, plan)
    memory = tuple(
        part.without_kv_cache + plan.kv_cache_tokens * part.kv_per_token + variants[rank]
        for rank, part in enumerate(parts)
    )
    return Estimate(times.ttft.value, times.tpot.value, memory, accuracy, times.basis)


def check(spec: ModelSpec, plan: Plan, workload: Workload) -> None:
    """Raises PlanError, naming the field."""
    check_plan(spec, plan)
    _check_load(spec, workload)


def check_plan(spec: ModelSpec, plan: Plan) -> None:
    """Raises PlanError, naming the field."""
    layers = plan.layers_per_stage
    if problem := tp_problem(spec, plan.tensor_parallel):
        raise PlanError("tensorParallel", f"{problem}; choose another degree of tensor parallelism")
    if not layers or min(layers) < 1 or sum(layers) != spec.num_layers:
        raise PlanError(
            "layersPerStage",
            f"expected stages of at least one layer that sum to {spec.num_layers}, "
            f"got {','.join(map(str, layers)) or 'none'} (sum {sum(layers)}); change the split",
        )
    if plan.quantization not in ALIASES:
        raise PlanError(
            "quantization",
            f"expected one of {', '.join(sorted(ALIASES))}, got {plan.quantization!r}; other formats "
            "cannot be served yet",
        )


def _check_load(spec: ModelSpec, workload: Workload) -> None:
    for name, count in (
        ("batch", workload.batch),
        ("inputTokens", workload.input_tokens),
        ("outputTokens", workload.output_tokens),
    ):
        if not 1 <= count <= MAX_COUNT:
            raise PlanError(name, f"expected {name} of 1 to {MAX_COUNT}, got {count}; correct it")
    length = workload.input_tokens + workload.output_tokens
    if length > spec.max_position:
        raise PlanError(
            "inputTokens",
            f"expected at most {spec.max_position} tokens of prompt and answer, the model's positions, got "
            f"{length}; shorten one of them",
        )


# --- time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Times:
    ttft: Interval
    tpot: Interval
    latency: Interval
    basis: Basis
    notes: tuple[str, ...]


def _rough(ground: Ground, plan: Plan, workload: Workload) -> _Times:
    """The roofline counts adapters by the plan's slots, and knows no other kinds of variants."""
    found = estimate(ground.spec, plan, ground.rates, workload, 1.0)
    total = found.latency_s(workload.output_tokens)
    return _Times(
        _within_factor(found.ttft_s, ROUGH_FACTOR),
        _within_factor(found.tpot_s, ROUGH_FACTOR),
        _within_factor(total, ROUGH_FACTOR),
        Basis.ROUGH,
        ("no profile of this architecture on this device: a roofline, rough by its nature",),
    )


def _physical(ground: Ground, plan: Plan, workload: Workload, load: VariantLoad) -> _Times:
    assert ground.calibration is not None
    calibration = dataclasses.replace(ground.calibration, batched_tokens=plan.batched_tokens)
    run = _as_it_runs(ground, plan)
    cut = _nearest(calibration, run.tensor_parallel)
    found = latency(calibration, cut, run.layers_per_stage, workload)
    hops_s = calibration.hop_s * (plan.pipeline_parallel - run.pipeline_parallel)
    scale = _scale(ground, run, cut, workload)
    fill = prefill_time(calibration, cut, load, workload.input_tokens)
    step = decode_time(calibration, cut, load)
    layers, times = ground.spec.num_layers, calibration.at(cut)
    wider = (
        _stretch(times.decode.widest, workload.batch),
        _stretch(times.prefill.widest, min(plan.batched_tokens, workload.batch * workload.input_tokens)),
    )
    elsewhere = PER_DOUBLING * abs(math.log2(run.tensor_parallel / cut.tensor_parallel))
    elsewhere += PER_DOUBLING * math.log2(ground.shared) + PER_STAGE * (run.pipeline_parallel - 1)
    shares = (times.decode.error, NOISE, wider[0], elsewhere)
    tpot = _widened(found.tpot_s + hops_s, step, layers, scale.tpot, shares)
    shares = (times.prefill.error, NOISE, wider[1], elsewhere)
    ttft = _widened(found.ttft_s + hops_s, fill, layers, scale.ttft, shares)
    last = _widened(found.ttft_last_s + hops_s, fill, layers, scale.ttft, shares)
    return _Times(
        ttft,
        tpot,
        _total(last, tpot, workload.output_tokens - 1),
        Basis.PROFILE,
        _notes(cut, plan, ground, load),
    )


def _as_it_runs(ground: Ground, plan: Plan) -> Plan:
    """Ranks that share one device take turns: together they take what one rank with all of it does."""
    if ground.shared == 1:
        return plan
    return dataclasses.replace(plan, tensor_parallel=1, layers_per_stage=(ground.spec.num_layers,))


def _nearest(calibration: Calibration, tp: int) -> Cut:
    """The measured cut whose TP is nearest, in doublings; of two the smaller."""
    return min(calibration.times, key=lambda cut: (abs(math.log2(cut.tensor_parallel / tp)), cut))


@dataclass(frozen=True)
class _Scale:
    ttft: float
    tpot: float


def _scale(ground: Ground, plan: Plan, cut: Cut, workload: Workload) -> _Scale:
    """How a plan differs from what was measured, as the roofline sees it; 1 for what was measured."""
    if cut.tensor_parallel == plan.tensor_parallel:
        return _Scale(1.0, 1.0)
    measured = dataclasses.replace(plan, tensor_parallel=cut.tensor_parallel)
    here, there = (
        estimate(ground.spec, one, [ground.rates[0]] * one.world_size, workload, 1.0)
        for one in (plan, measured)
    )
    return _Scale(here.ttft_s / there.ttft_s, here.tpot_s / there.tpot_s)


def _stretch(widest: float, work: float) -> float:
    return PER_DOUBLING * max(0.0, math.log2(work / widest))


def _widened(
    value_s: float, variants: VariantTime, layers: int, scale: float, shares: Sequence[float]
) -> Interval:
    """Below, variants are hidden behind the base's own work; above, kernels pad them, and take twice that."""
    share = NINE_IN_TEN * math.sqrt(sum(one**2 for one in shares))
    alone, added, padded = value_s * scale, layers * variants.added_s, 2 * layers * variants.padded_s
    return Interval(alone + added, alone / (1 + share), (alone + max(added, padded)) * (1 + share))


def _total(first: Interval, each: Interval, times: int) -> Interval:
    """The widest the sum can be: errors of one profile go the same way."""
    return Interval(
        first.value + times * each.value, first.low + times * each.low, first.high + times * each.high
    )


def _within_factor(value: float, factor: float) -> Interval:
    return Interval(value, value / factor, value * factor)


def _inverse(amount: float, seconds: Interval) -> Interval:
    return Interval(amount / seconds.value, amount / seconds.high, amount / seconds.low)


def _notes(cut: Cut, plan: Plan, ground: Ground, load: VariantLoad) -> tuple[str, ...]:
    notes = []
    if ground.shared > 1:
        notes.append(
            f"{ground.shared} ranks share a device: taken for one rank that has all of it, and the hops"
        )
    elif cut.tensor_parallel != plan.tensor_parallel:
        notes.append(f"TP={plan.tensor_parallel} was not measured; scaled from TP={cut.tensor_parallel}")
    if plan.pipeline_parallel > 1 and not _has_pipeline(ground.calibration):
        notes.append("no pipeline was measured on this device; what a hop takes is from another one")
    if load.rows:
        notes.append("variants are bytes and operations at the base's measured pace; none was measured")
    return tuple(notes)


def _has_pipeline(calibration: Calibration | None) -> bool:
    found = calibration.footprints if calibration else ()
    return any(len(footprint.setting.layers_per_stage) > 1 for footprint in found)


# --- memory -------------------------------------------------------------------------------------------


def _parts(ground: Ground, plan: Plan) -> tuple[RankBytes, ...]:
    """By rank. Activations grow with a step's tokens, so those of other steps are not looked at."""
    if ground.calibration is not None:
        alike = [f for f in ground.calibration.footprints if f.setting.batched_tokens == plan.batched_tokens]
        known = dataclasses.replace(ground.calibration, footprints=tuple(alike))
        return rank_bytes(known, Cut(plan.tensor_parallel), plan)
    return tuple(
        RankBytes(
            weights=stage_weight_bytes(ground.spec, plan, stage),
            activations=allowance_bytes(ground.spec, plan, stage) - RUNTIME_BYTES,
            graphs=0,
            runtime=RUNTIME_BYTES,
            kv_per_token=layers * kv_bytes_per_token(ground.spec, plan.tensor_parallel),
        )
        for stage, layers in enumerate(plan.layers_per_stage)
        for _ in range(plan.tensor_parallel)
    )


def _ranks(ground: Ground, plan: Plan, workload: Workload) -> tuple[RankCost, ...]:
    tokens = workload.batch * (workload.input_tokens + workload.output_tokens)
    cut = Cut(plan.tensor_parallel)
    seen = ground.calibration is not None and any(
        Cut.of(f.setting) == cut and f.setting.batched_tokens == plan.batched_tokens
        for f in ground.calibration.footprints
    )
    share = MEASURED_MEMORY if seen else ALLOWED_MEMORY
    variants = _variants(ground.spec, plan)
    return tuple(
        _rank_cost(part, variants[rank], tokens, share) for rank, part in enumerate(_parts(ground, plan))
    )


def _rank_cost(part: RankBytes, variants: int, tokens: int, share: float) -> RankCost:
    kv_cache = tokens * part.kv_per_token
    total = part.without_kv_cache + kv_cache + variants
    unsure = share * (part.activations + part.graphs + part.runtime)
    return RankCost(
        part.weights,
        part.activations,
        part.graphs,
        part.runtime,
        variants,
        kv_cache,
        Interval(total, total - unsure, total + unsure),
    )


def _variants(spec: ModelSpec, plan: Plan) -> list[int]:
    """By rank."""
    stages = [variant_bytes(spec, plan, stage) for stage in range(plan.pipeline_parallel)]
    return [stage for stage in stages for _ in range(plan.tensor_parallel)]


def _kv_capacity(
    ranks: Sequence[RankCost], free_bytes: Sequence[int], spec: ModelSpec, plan: Plan
) -> int | None:
    """Tokens that all ranks can hold: the engine uses the least of them on every rank."""
    if not free_bytes:
        return None
    per_token = kv_bytes_per_token(spec, plan.tensor_parallel)
    return min(
        max(0, free - round(cost.total.value) + cost.kv_cache)
        // (plan.layers_per_stage[rank // plan.tensor_parallel] * per_token)
        for rank, (cost, free) in enumerate(zip(ranks, free_bytes, strict=True))
    )
