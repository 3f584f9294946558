"""TTFT, TPOT and latency of plans under one load. With a calibration the physical model computes them, else
the roofline. Plans that differ only in how many layers each stage has are computed together."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from profiler.physical.calibration import Calibration, Cut
from profiler.physical.pipeline import Latencies, latencies, seen_of_pass
from profiler.physical.variants import VariantLoad
from profiler.predicting.intervals import (
    ELSEWHERE,
    LAUNCH_S,
    NOISE,
    OTHER_ENGINE,
    OTHER_QUANTIZATION,
    PER_DOUBLING,
    PER_STAGE,
    Floats,
    Ranges,
    roughly,
    stretch,
    widened,
)
from profiler.predicting.stages import nearest, prompt_pass, scale, token_pass
from profiler.predicting.types import Ground
from profiler.predicting.variants import errors_of, variants_s
from profiler.roofline import estimate
from profiler.types import Basis, Interval, Plan, Workload


@dataclass(frozen=True)
class Times:
    """`ttft` and `tpot` are means over the requests, `ttft_last` is the last request's. `step`: the time
    between a request's tokens while no prompts are filled."""

    ttft: Interval
    ttft_last: Interval
    tpot: Interval
    step: Interval
    latency: Interval
    basis: Basis
    notes: tuple[str, ...]


def times_of(ground: Ground, plans: Sequence[Plan], workload: Workload, load: VariantLoad) -> list[Times]:
    """Times of each plan, in the order of `plans`. Without a calibration `ground.rates` must belong to the
    only plan."""
    if ground.calibration is None:
        return [_rough(ground, plan, workload) for plan in plans]
    alike: defaultdict[_Alike, list[int]] = defaultdict(list)
    for number, plan in enumerate(plans):
        alike[_alike(plan)].append(number)
    times: dict[int, Times] = {}
    for how, numbers in alike.items():
        splits = [plans[number].layers_per_stage for number in numbers]
        times |= zip(numbers, _physical(ground, how, splits, workload, load), strict=True)
    return [times[number] for number in range(len(plans))]


@dataclass(frozen=True)
class _Alike:
    """What plans that are computed together have in common."""

    tensor_parallel: int
    stages: int
    batched_tokens: int
    quantization: str


def _alike(plan: Plan) -> _Alike:
    return _Alike(plan.tensor_parallel, plan.pipeline_parallel, plan.batched_tokens, plan.quantization)


def _rough(ground: Ground, plan: Plan, workload: Workload) -> Times:
    """Times by the roofline. It counts adapters by the plan's slots, and no other kinds of variants. It fills
    all prompts in one pass: a step that takes a part of them counts as the same part of the pass."""
    rough = estimate(ground.spec, plan, ground.rates, workload, 1.0)
    seen = seen_of_pass(workload, plan.batched_tokens, rough.ttft_s, rough.tpot_s)
    last, step = roughly(rough.ttft_s), roughly(rough.tpot_s)
    return Times(
        roughly(seen.ttft_s),
        last,
        roughly(seen.tpot_s),
        step,
        roughly(rough.latency_s(workload.output_tokens)),
        Basis.ROUGH,
        ("no profile of this architecture on this device: these are rough figures of a roofline",),
    )


def _physical(
    ground: Ground, how: _Alike, splits: Sequence[tuple[int, ...]], workload: Workload, load: VariantLoad
) -> list[Times]:
    assert ground.calibration is not None
    calibration = dataclasses.replace(ground.calibration, batched_tokens=how.batched_tokens)
    layers = ground.spec.num_layers
    tp, run = how.tensor_parallel, np.array(splits)
    if ground.shared > 1:  # ranks that share one device take turns: together they count as one rank
        tp, run = 1, np.full((len(splits), 1), layers)
    wanted = Cut(tp, how.quantization)
    cut = nearest(calibration, wanted)
    alone = latencies(calibration, cut, run, workload)
    with_variants = [
        latencies(calibration, cut, run, workload, variants)
        for variants in variants_s(calibration, cut, load, workload)
    ]
    figures = [alone, *(with_variants or [alone] * 3)]
    hops_s = calibration.hop_s * (how.stages - run.shape[1])
    prefill_scale, decode_scale = (
        scale(ground, wanted, cut, work) for work in (prompt_pass(workload), token_pass(workload))
    )
    times = calibration.at(cut)
    elsewhere = PER_DOUBLING * (abs(math.log2(tp / cut.tensor_parallel)) + math.log2(ground.shared))
    elsewhere += PER_STAGE * (run.shape[1] - 1) + (0.0 if ground.measured is None else ELSEWHERE)
    elsewhere += 0.0 if cut.quantization == how.quantization else OTHER_QUANTIZATION
    wider = stretch(times.decode.widest, workload.batch)
    turns = calibration.turn_error * alone.in_turns.astype(np.float64)
    unsure = errors_of(calibration, load)
    decode_shares = (times.decode.error, NOISE, wider, elsewhere, turns, unsure.decode)
    tokens = min(how.batched_tokens, workload.batch * workload.input_tokens)
    prefill_shares = (
        times.prefill.error,
        NOISE,
        stretch(times.prefill.widest, tokens),
        elsewhere,
        unsure.prefill,
        OTHER_ENGINE if ground.launched else 0.0,
    )

    def decoding(of: Callable[[Latencies], Floats]) -> Ranges:
        return widened([of(each) + hops_s for each in figures], decode_scale, decode_shares).up_to(
            alone.turns_most_s
        )

    def first_tokens(of: Callable[[Latencies], Floats]) -> Ranges:
        launches = LAUNCH_S * layers / of(alone)
        return widened([of(each) + hops_s for each in figures], prefill_scale, (*prefill_shares, launches))

    step, last_step = decoding(lambda found: found.step_s), decoding(lambda found: found.last_step_s)
    prompts = widened(
        [found.tpot_s - found.step_s for found in figures], prefill_scale, prefill_shares
    )  # prompts of other requests, between a request's tokens
    ttft, last = first_tokens(lambda found: found.ttft_s), first_tokens(lambda found: found.ttft_last_s)
    latency = last.plus(last_step, workload.output_tokens - 1)
    notes = _notes(cut, how, ground, load, unsure.is_measured)
    found = zip(
        ttft.intervals(),
        last.intervals(),
        step.plus(prompts, 1).ordered().intervals(),
        step.intervals(),
        latency.intervals(),
        strict=True,
    )
    return [Times(*five, Basis.PROFILE, notes) for five in found]


def _notes(
    cut: Cut, how: _Alike, ground: Ground, load: VariantLoad, variants_measured: bool
) -> tuple[str, ...]:
    notes = []
    if ground.shared > 1:
        notes.append(
            f"{ground.shared} ranks share a device: estimated as one rank that has the whole device, plus "
            "the hops"
        )
    elif cut.tensor_parallel != how.tensor_parallel:
        notes.append(f"TP={how.tensor_parallel} was not measured; scaled from TP={cut.tensor_parallel}")
    if cut.quantization != how.quantization:
        notes.append(f"{how.quantization} was not measured; scaled from {cut.quantization} by their bytes")
    if ground.measured is not None:
        notes.append("this kind of device was not measured; scaled from a measured device by their rates")
    if how.stages > 1 and not _has_pipeline(ground.calibration):
        notes.append(
            "no pipeline was measured on this device; the time of a hop is another device's, and the host's "
            "time per batch and the stages' effect on each other are unknown"
        )
    if load.rows and not variants_measured:
        notes.append(
            "no variant was measured; variants' times follow from their bytes and operations at the base's "
            "rates"
        )
    return tuple(notes)


def _has_pipeline(calibration: Calibration | None) -> bool:
    footprints = calibration.footprints if calibration else ()
    return any(len(footprint.setting.layers_per_stage) > 1 for footprint in footprints)
