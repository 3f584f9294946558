"""Compute a `Calibration` from measurements of fingerprints."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import scipy  # which imports a part of itself when that is first used

from profiler.measurements import Footprint, Measurement, Timing
from profiler.physical.calibration import HOP_S, Calibration, Cut, CutTimes
from profiler.physical.curves import Burst, Line, Part, Step, fit, fit_bursts
from profiler.physical.pipeline import Latency, latency
from profiler.physical.prefill import split_prefill
from profiler.physical.variant_costs import fit_variants
from profiler.shards import (
    active_shard_elements,
    kv_bytes_per_token,
    layer_moved_bytes,
    layer_shard_bytes,
    vocab_table_bytes,
)
from profiler.types import ModelSpec, Workload

REPETITION = 0.03  # the difference between repeated runs; a difference this small shows no turns
MAX_LOST = 0.5  # of a stage's pace: the limit of the search
TURN_ERROR = 0.12  # the same load took 5.5 ms per token in one engine on H200s and 6.9 ms in another


def calibrate(spec: ModelSpec, measured: Iterable[Measurement]) -> Calibration:
    """Fit a calibration to measurements of fingerprints, all with the same `batched_tokens`.

    Raises ValueError when steps differ, or when no timing has a single stage.
    """
    everything = tuple(measured)
    timings = [m for m in everything if isinstance(m, Timing) and not m.point.mix]
    whole = [m for m in timings if len(m.setting.layers_per_stage) == 1]
    if not whole:
        raise ValueError("expected timings of at least one fingerprint in a single stage, got none")
    if len(steps := {timing.setting.batched_tokens for timing in timings}) != 1:
        raise ValueError(f"expected timings with steps of as many tokens, got steps of {sorted(steps)}")
    (batched_tokens,) = steps
    by_cut: defaultdict[Cut, list[Timing]] = defaultdict(list)
    for timing in whole:
        by_cut[Cut.of(timing.setting)].append(timing)
    times = _times_of_all(spec, by_cut, batched_tokens)
    footprints = tuple(m for m in everything if isinstance(m, Footprint) and not m.setting.launched)
    calibration = Calibration(spec, batched_tokens, times, footprints=footprints)
    pipelines = [m for m in timings if len(m.setting.layers_per_stage) > 1 and Cut.of(m.setting) in times]
    hop_s = _hop_s(calibration, pipelines)
    calibration = dataclasses.replace(calibration, hop_s=HOP_S if hop_s is None else hop_s)
    turn_s, turn_error, most_s = _turn(calibration, pipelines)
    calibration = dataclasses.replace(
        calibration,
        turn_s=turn_s,
        turn_error=turn_error,
        turn_most_s=most_s,
        lost_pace=_lost_pace(calibration, pipelines),
    )
    mixed = [m for m in everything if isinstance(m, Timing) and m.point.mix]
    variants, together = fit_variants(calibration, mixed, whole)
    return dataclasses.replace(calibration, variants=variants, together=together)


def _times_of_all(
    spec: ModelSpec, by_cut: Mapping[Cut, Sequence[Timing]], batched_tokens: int
) -> dict[Cut, CutTimes]:
    """Times of every cut. Cuts that were measured at several depths come first: the other cuts take the time
    outside of layers from them."""
    several = [cut for cut, timings in by_cut.items() if len({t.setting.layers for t in timings}) > 1]
    times: dict[Cut, CutTimes] = {}
    for cut in sorted(by_cut, key=lambda cut: (cut not in several, cut)):
        known = [other for other in several if other != cut and other in times]
        alike = [other for other in known if other.storage == cut.storage] or known
        like = None if cut in several or not alike else min(alike)
        # In a prompt's step the head processes one token.
        of_bytes = _Beside(_head_to_layer(spec, cut), 0.0, cut in several, None if cut in several else 0.0)
        beside = of_bytes if like is None else _beside(spec, cut, like, times[like])
        times[cut] = _times(spec, cut, by_cut[cut], batched_tokens, beside)
    return times


@dataclass(frozen=True)
class _Beside:
    """The time outside of layers, for cuts of one depth: relative to a layer, or in seconds by work.
    `is_separated`: different depths separate it from layers, here or where it was measured. `later`: the
    additional time of a token in a layer after a burst's first step, if that comes from another cut."""

    decode: float | Line
    prefill: float | Line
    is_separated: bool
    later: float | None = None


def _head_to_layer(spec: ModelSpec, cut: Cut) -> float:
    """The ratio of the head's bytes to a layer's."""
    layer_bytes = layer_shard_bytes(spec, cut.tensor_parallel, cut.quantization)
    return vocab_table_bytes(spec, cut.tensor_parallel) / layer_bytes


def _beside(spec: ModelSpec, cut: Cut, like: Cut, times: CutTimes) -> _Beside:
    """The time outside of layers of a cut, from `like`; only the head changes, which is cut with the
    layers."""
    rest, layer = times.decode.rest, times.decode.layer
    head_s = _head_to_layer(spec, like) * layer.ys[0]
    saved_s = head_s * (1 - like.tensor_parallel / cut.tensor_parallel)
    decode = Line(rest.xs, tuple(max(0.0, y - saved_s) for y in rest.ys))
    return _Beside(decode, times.prefill.rest, True, times.prefill.later_to_token)


def _times(
    spec: ModelSpec, cut: Cut, timings: Sequence[Timing], batched_tokens: int, beside: _Beside
) -> CutTimes:
    decoding = [decode_step(timing) for timing in _together(timings)]
    cached = kv_bytes_per_token(spec, cut.tensor_parallel)
    least = min(step.work for step in decoding)
    read = layer_moved_bytes(spec, cut.tensor_parallel, least, cut.quantization)
    decode = fit(decoding, beside.decode, cached / read)
    bursts = [burst for timing in timings for burst in prefill_bursts(timing, batched_tokens)]
    prefill = fit_bursts(bursts, beside.prefill, decode.pair_s, _pair_to_token(spec), beside.later)
    head_s = decode.layer.ys[0] * vocab_table_bytes(spec, cut.tensor_parallel) / read
    return CutTimes(decode, prefill, head_s if beside.is_separated else math.inf)


def _pair_to_token(spec: ModelSpec) -> float:
    """A layer's multiplications for a pair of tokens that attend to each other, over those for a token."""
    return 2 * spec.num_heads * spec.head_dim / active_shard_elements(spec, 1)


def _together(timings: Sequence[Timing]) -> Sequence[Timing]:
    """The timings in which all requests decode together at some time; all timings, if there are none."""
    return [timing for timing in timings if timing.together] or timings


def decode_step(timing: Timing) -> Step:
    """A decode step: each sequence of the batch reads its context, the prompt and half of the output."""
    batch, context = timing.point.batch, timing.point.input_tokens + timing.output_tokens / 2
    return Step(batch, batch * context, timing.setting.layers, timing.tpot_s)


def prefill_bursts(timing: Timing, batched_tokens: int) -> list[Burst]:
    """The steps until the last request's TTFT and, if there are several, until the mean request's TTFT."""
    load, layers = _load(timing), timing.setting.layers
    prefill_steps = split_prefill(load, batched_tokens).steps
    parts = tuple(
        prefill_step.part(load.input_tokens, not number) for number, prefill_step in enumerate(prefill_steps)
    )
    last = Burst(parts, layers, timing.ttft_last_s)
    if len(prefill_steps) == 1 and prefill_steps[0].count == 1:
        return [last]
    waited, after = list[Part](), 1.0
    for number, prefill_step in enumerate(prefill_steps):
        # Requests whose prompts end in a step wait for half of it on average, later requests for all of it.
        share = prefill_step.requests / load.batch
        weight = after - share * (prefill_step.count - 1) / prefill_step.count / 2
        waited.append(prefill_step.part(load.input_tokens, not number, weight))
        after -= share
    return [last, Burst(tuple(waited), layers, timing.ttft_s)]


def _load(timing: Timing) -> Workload:
    return Workload(timing.point.batch, timing.point.input_tokens, timing.output_tokens)


def _hop_s(calibration: Calibration, pipelines: Sequence[Timing]) -> float | None:
    """Seconds for each boundary between stages: the median excess over the sum of the stages, in batches that
    do not overlap with other batches."""
    excesses = []
    for timing in pipelines:
        if timing.point.batch * timing.point.input_tokens <= calibration.batched_tokens:
            step, times = decode_step(timing), calibration.at(Cut.of(timing.setting))
            layers = times.decode.layers_s(step.layers, step.work, step.pairs)
            hops = len(timing.setting.layers_per_stage) - 1
            excesses.append((timing.tpot_s - layers - times.decode.rest_s(step.work)) / hops)
    return max(0.0, sorted(excesses)[len(excesses) // 2]) if excesses else None


def _turn(calibration: Calibration, pipelines: Sequence[Timing]) -> tuple[float, float, float]:
    """Three figures of the host's turn. First its seconds: the value that predicts pipelines with several
    groups in flight best (least squares of logarithms); 0 if no turn shows. Second its root mean square error
    over the pipelines in which it decides, at least TURN_ERROR. Third, if no turn shows, the longest that it
    may be without showing: the shortest time of a group; 0 if there is no group."""
    several = []
    for timing in pipelines:
        stages = len(timing.setting.layers_per_stage)
        groups = len(split_prefill(_load(timing), calibration.batched_tokens, stages).groups)
        if timing.together and groups > 1:
            several.append(_Turn(_predicted(calibration, timing).step_s / groups, timing.tpot_s / groups))
    several.sort(key=lambda turn: turn.without_s)
    seen = [math.log(turn.seen_s) for turn in several]
    means = [math.exp(sum(seen[:n]) / n) for n in range(1, len(seen) + 1)]
    candidates = [0.0, *means, *(turn.without_s for turn in several)]

    def miss(turn_s: float) -> float:
        return sum(math.log(max(turn.without_s, turn_s) / turn.seen_s) ** 2 for turn in several)

    turn_s = 0.0 if miss(0.0) <= len(several) * REPETITION**2 else min(candidates, key=miss)
    if not turn_s:
        return 0.0, 0.0, min((turn.seen_s for turn in several), default=0.0)
    decided = [math.log(turn_s / turn.seen_s) for turn in several if turn.without_s < turn_s]
    error = math.sqrt(sum(log_ratio**2 for log_ratio in decided) / len(decided)) if decided else 0.0
    return turn_s, max(TURN_ERROR, error), 0.0


@dataclass(frozen=True)
class _Turn:
    """A load with several groups in flight: a group's step as predicted without the host's turn, and as
    measured."""

    without_s: float
    seen_s: float


def _lost_pace(calibration: Calibration, pipelines: Sequence[Timing]) -> dict[str, float]:
    """The lost share of pace by quantization, from pipelines in which a step follows one that ends with
    tokens."""
    several: defaultdict[str, list[Timing]] = defaultdict(list)
    for timing in pipelines:
        stages = len(timing.setting.layers_per_stage)
        if round(split_prefill(_load(timing), calibration.batched_tokens, stages).reporting) > 1:
            several[timing.setting.quantization].append(timing)
    return {
        quantization: _lost_share(calibration, quantization, seen) for quantization, seen in several.items()
    }


def _lost_share(calibration: Calibration, quantization: str, several: Sequence[Timing]) -> float:
    """The share that predicts the measured first tokens best."""

    def miss(share: float) -> float:
        here = dataclasses.replace(calibration, lost_pace={quantization: share})
        return sum(abs(math.log(_predicted(here, timing).ttft_s / timing.ttft_s)) for timing in several)

    best = scipy.optimize.minimize_scalar(miss, bounds=(0.0, MAX_LOST), method="bounded")
    return min(0.0, float(best.x), key=miss)


def _predicted(calibration: Calibration, timing: Timing) -> Latency:
    setting = timing.setting
    return latency(calibration, Cut.of(setting), setting.layers_per_stage, _load(timing))
