"""TTFT, TPOT and latency of plans under one load: by the physical model where there is a calibration, else by
the roofline. Plans that differ only in how many layers each stage has are computed together."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler.physical.calibration import Calibration, Cut
from profiler.physical.pipeline import latencies
from profiler.physical.variants import VariantLoad, decode_time, prefill_time
from profiler.predicting.intervals import (
    ELSEWHERE,
    LAUNCH_S,
    NOISE,
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
from profiler.roofline import estimate
from profiler.types import Basis, Interval, Plan, Workload


@dataclass(frozen=True)
class Times:
    ttft: Interval
    tpot: Interval
    latency: Interval
    basis: Basis
    notes: tuple[str, ...]


def times_of(ground: Ground, plans: Sequence[Plan], workload: Workload, load: VariantLoad) -> list[Times]:
    """Times of each plan, in the order of `plans`. Without a calibration `ground.rates` must be those of the
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
    """What plans have in common that are computed together."""

    tensor_parallel: int
    stages: int
    batched_tokens: int
    quantization: str


def _alike(plan: Plan) -> _Alike:
    return _Alike(plan.tensor_parallel, plan.pipeline_parallel, plan.batched_tokens, plan.quantization)


def _rough(ground: Ground, plan: Plan, workload: Workload) -> Times:
    """The roofline counts adapters by the plan's slots, and knows no other kinds of variants."""
    rough = estimate(ground.spec, plan, ground.rates, workload, 1.0)
    return Times(
        roughly(rough.ttft_s),
        roughly(rough.tpot_s),
        roughly(rough.latency_s(workload.output_tokens)),
        Basis.ROUGH,
        ("no profile of this architecture on this device: a roofline, rough by its nature",),
    )


def _physical(
    ground: Ground, how: _Alike, splits: Sequence[tuple[int, ...]], workload: Workload, load: VariantLoad
) -> list[Times]:
    assert ground.calibration is not None
    calibration = dataclasses.replace(ground.calibration, batched_tokens=how.batched_tokens)
    layers = ground.spec.num_layers
    tp, run = how.tensor_parallel, np.array(splits)
    if ground.shared > 1:  # ranks that share one device take turns: together what one with all of it takes
        tp, run = 1, np.full((len(splits), 1), layers)
    wanted = Cut(tp, how.quantization)
    cut = nearest(calibration, wanted)
    figures = latencies(calibration, cut, run, workload)
    hops_s = calibration.hop_s * (how.stages - run.shape[1])
    slower = tuple(scale(ground, wanted, cut, work) for work in (prompt_pass(workload), token_pass(workload)))
    times = calibration.at(cut)
    elsewhere = PER_DOUBLING * (abs(math.log2(tp / cut.tensor_parallel)) + math.log2(ground.shared))
    elsewhere += PER_STAGE * (run.shape[1] - 1) + (0.0 if ground.measured is None else ELSEWHERE)
    elsewhere += 0.0 if cut.quantization == how.quantization else OTHER_QUANTIZATION
    wider = stretch(times.decode.widest, workload.batch)
    step = decode_time(calibration, cut, load)
    turns = calibration.turn_error * figures.in_turns.astype(np.float64)
    tpot = widened(
        figures.tpot_s + hops_s, step, layers, slower[1], (times.decode.error, NOISE, wider, elsewhere, turns)
    ).up_to(figures.turns_most_s)
    tokens = min(how.batched_tokens, workload.batch * workload.input_tokens)
    prefill = prefill_time(calibration, cut, load, workload.input_tokens)
    shares = (times.prefill.error, NOISE, stretch(times.prefill.widest, tokens), elsewhere)

    def first_tokens(seconds: Floats) -> Ranges:
        launches = LAUNCH_S * layers / seconds
        return widened(seconds + hops_s, prefill, layers, slower[0], (*shares, launches))

    ttft, last = first_tokens(figures.ttft_s), first_tokens(figures.ttft_last_s)
    notes = _notes(cut, how, ground, load, step.is_measured)
    return _together(ttft, tpot, last.plus(tpot, workload.output_tokens - 1), notes)


def _together(ttft: Ranges, tpot: Ranges, latency: Ranges, notes: tuple[str, ...]) -> list[Times]:
    every = zip(ttft.intervals(), tpot.intervals(), latency.intervals(), strict=True)
    return [Times(*three, Basis.PROFILE, notes) for three in every]


def _notes(
    cut: Cut, how: _Alike, ground: Ground, load: VariantLoad, variants_measured: bool
) -> tuple[str, ...]:
    notes = []
    if ground.shared > 1:
        notes.append(
            f"{ground.shared} ranks share a device: taken for one rank that has all of it, and the hops"
        )
    elif cut.tensor_parallel != how.tensor_parallel:
        notes.append(f"TP={how.tensor_parallel} was not measured; scaled from TP={cut.tensor_parallel}")
    if cut.quantization != how.quantization:
        notes.append(f"{how.quantization} was not measured; scaled from {cut.quantization} by their bytes")
    if ground.measured is not None:
        notes.append("this kind of device was not measured; scaled from one that was, by their rates")
    if how.stages > 1 and not _has_pipeline(ground.calibration):
        notes.append(
            "no pipeline was measured on this device; what a hop takes is from another one, and what the "
            "host takes for each of several batches, or earlier stages lose to later ones, is not known"
        )
    if load.rows and not variants_measured:
        notes.append("variants are bytes and operations at the base's measured pace; none was measured")
    return tuple(notes)


def _has_pipeline(calibration: Calibration | None) -> bool:
    footprints = calibration.footprints if calibration else ()
    return any(len(footprint.setting.layers_per_stage) > 1 for footprint in footprints)
