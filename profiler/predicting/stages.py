"""Time and memory of one stage of a plan, linear in its layers, for the placement's solver. Pure.

If this architecture was measured, its steps take what was measured. A TP, quantization or device without
measurements is scaled from the nearest measured one by the ratio of their rooflines (`profiler.roofline`).
Without any measurement, the roofline alone is used."""

from __future__ import annotations

import dataclasses
import math

from profiler.physical.calibration import Calibration, Cut, CutTimes
from profiler.physical.curves import StepTime
from profiler.predicting.memory import Memory
from profiler.predicting.types import Ground
from profiler.roofline import Pass, StageTime, merged_slot_bytes, stage_time, variant_lines
from profiler.types import Plan, Workload

Line = tuple[int, int]  # bytes outside the layers of a stage, and bytes of each layer
MANY = 1000  # layers: more than any stage has; their graphs take more than any pass gives back


def nearest(calibration: Calibration, wanted: Cut) -> Cut:
    """The measured cut with the TP nearest to `wanted`, in doublings; of two the smaller. Cuts whose layers
    are stored as in `wanted` are preferred; if there is none, all cuts count."""
    stored = [cut for cut in calibration.times if cut.storage == wanted.storage]
    return min(
        stored or calibration.times,
        key=lambda cut: (abs(math.log2(cut.tensor_parallel / wanted.tensor_parallel)), cut),
    )


def scale(ground: Ground, wanted: Cut, cut: Cut, load: Pass) -> float:
    """The ratio of a pass through a whole model to the measured pass, by the roofline; 1: no difference."""
    rates = ground.rates[0]
    measured = ground.measured or rates
    if cut == wanted and measured == rates:
        return 1.0
    spec = ground.spec
    here, there = (
        stage_time(
            spec,
            Plan(of_cut.tensor_parallel, (spec.num_layers,), of_cut.quantization, 1, 0, 0, 0),
            device,
            load,
        )
        for of_cut, device in ((wanted, rates), (cut, measured))
    )
    return here.of(spec.num_layers, is_last=True) / there.of(spec.num_layers, is_last=True)


def prompt_pass(workload: Workload) -> Pass:
    return Pass(workload.batch, workload.input_tokens, 0.0)


def token_pass(workload: Workload) -> Pass:
    """A step in which each sequence decodes a token, with half of the output cached after its prompt."""
    return Pass(workload.batch, 1, workload.input_tokens + workload.output_tokens / 2)


def prompt_time(ground: Ground, plan: Plan, tokens: int) -> StageTime:
    """Time of one prompt alone through a stage of `plan`, over as many steps as it takes."""
    load = Pass(1, tokens, 0.0)
    if ground.calibration is None:
        return stage_time(ground.spec, plan, ground.rates[0], load)
    times, factor = _measured(ground.calibration, ground, plan, load)
    steps = math.ceil(tokens / plan.batched_tokens)
    pairs = tokens * (tokens + 1) / 2
    taken = _linear(times.prefill, tokens / steps, pairs / steps).times(steps)
    later_s = times.prefill.later_s * tokens * (steps - 1) / steps
    once_s = times.prefill.once_s
    taken = dataclasses.replace(taken, layer_s=taken.layer_s + later_s, rest_s=taken.rest_s + once_s)
    return taken.times(factor)


def decode_time(ground: Ground, plan: Plan, sequences: float, context: float) -> StageTime:
    """A step in which each of `sequences` decodes one token, with `context` cached tokens each."""
    load = Pass(sequences, 1, context)
    if ground.calibration is None:
        return stage_time(ground.spec, plan, ground.rates[0], load)
    times, factor = _measured(ground.calibration, ground, plan, load)
    alone = _linear(times.decode, sequences, sequences * context)
    return dataclasses.replace(alone, gap_s=times.gap_s(sequences)).times(factor)


def _measured(calibration: Calibration, ground: Ground, plan: Plan, load: Pass) -> tuple[CutTimes, float]:
    """The times of the nearest cut. Ranks that share one device take turns: together they count as one
    rank."""
    wanted = Cut(1 if ground.shared > 1 else plan.tensor_parallel, plan.quantization)
    cut = nearest(calibration, wanted)
    return calibration.at(cut), scale(ground, wanted, cut, load)


def _linear(step: StepTime, work: float, pairs: float) -> StageTime:
    return StageTime(step.layers_s(1, work, pairs), step.rest_s(work))


def rank_lines(ground: Ground, plan: Plan) -> tuple[tuple[Line, ...], ...]:
    """For each stage of `plan`, with any number of layers: a rank's bytes, the maximum of some lines.

    Without variants there are two lines (captured graphs make them approximate). With few layers, the graphs
    fit into the memory that a pass gave back; with many layers they do not. Variants follow one of two lines.
    """
    memory, variants = Memory(ground, plan.kv_cache_tokens), variant_lines(ground.spec, plan)
    last = plan.pipeline_parallel - 1
    made = {}
    for stage in sorted({0, min(1, last), last}):  # the stages between the ends are alike
        lines = dict.fromkeys(_line(ground, memory, plan, stage, layers) for layers in (1, MANY))
        made[stage] = tuple((once + fixed, each + more) for once, each in lines for fixed, more in variants)
    return tuple(made[stage if stage in (0, last) else 1] for stage in range(plan.pipeline_parallel))


def _line(ground: Ground, memory: Memory, plan: Plan, stage: int, layers: int) -> Line:
    """The line through the bytes of `layers` layers and of one more."""
    here, there = (
        _bytes(
            ground, memory, dataclasses.replace(plan, layers_per_stage=(n,) * plan.pipeline_parallel), stage
        )
        for n in (layers, layers + 1)
    )
    each = there - here
    return here - layers * each, each


def _bytes(ground: Ground, memory: Memory, plan: Plan, stage: int) -> int:
    part, copied = memory.parts(plan, stage), merged_slot_bytes(ground.spec, plan, stage)
    return part.without_kv_cache + copied + plan.kv_cache_tokens * part.kv_per_token
