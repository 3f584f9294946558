"""From measurements of fingerprints to a `Calibration`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from profiler.measurements import Footprint, Measurement, Timing
from profiler.physical.calibration import HOP_S, Calibration, Cut, CutTimes
from profiler.physical.curves import Step, fit
from profiler.physical.variant_costs import fit_variants
from profiler.shards import kv_bytes_per_token, layer_moved_bytes, layer_shard_bytes, vocab_table_bytes
from profiler.types import ModelSpec


def calibrate(spec: ModelSpec, measured: Iterable[Measurement]) -> Calibration:
    """Learn from measurements of fingerprints, all with steps of as many tokens.

    Raises ValueError when steps differ, or no timing is of a single stage.
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
    times = {cut: _times(spec, cut, found, batched_tokens) for cut, found in by_cut.items()}
    footprints = tuple(m for m in everything if isinstance(m, Footprint))
    calibration = Calibration(spec, batched_tokens, times, footprints=footprints)
    hop_s = _hop_s(calibration, [m for m in timings if len(m.setting.layers_per_stage) > 1])
    found = dataclasses.replace(calibration, hop_s=HOP_S if hop_s is None else hop_s)
    mixed = [m for m in everything if isinstance(m, Timing) and m.point.mix]
    return dataclasses.replace(found, variants=fit_variants(found, mixed, whole))


def _times(spec: ModelSpec, cut: Cut, timings: Sequence[Timing], batched_tokens: int) -> CutTimes:
    layer_bytes = layer_shard_bytes(spec, cut.tensor_parallel, cut.quantization)
    head_to_layer = vocab_table_bytes(spec, cut.tensor_parallel) / layer_bytes
    decoding = [decode_step(timing) for timing in _together(timings)]
    cached = kv_bytes_per_token(spec, cut.tensor_parallel)
    least = min(step.work for step in decoding)
    read = layer_moved_bytes(spec, cut.tensor_parallel, least, cut.quantization)
    fills = [step for timing in timings if (step := prefill_step(timing, batched_tokens))]
    return CutTimes(
        decode=fit(decoding, head_to_layer, cached / read),
        prefill=fit(fills or [_first_step(timings)], 0.0),  # the head sees one token of each prompt
    )


def _together(timings: Sequence[Timing]) -> Sequence[Timing]:
    """Those whose steps while all decode could be seen; all, if none could."""
    return [timing for timing in timings if timing.together] or timings


def decode_step(timing: Timing) -> Step:
    """A step in which each of the batch reads its context: the prompt and half of the output."""
    batch, context = timing.point.batch, timing.point.input_tokens + timing.output_tokens / 2
    return Step(batch, batch * context, timing.setting.layers, timing.tpot_s)


def prefill_step(timing: Timing, batched_tokens: int) -> Step | None:
    """The step that fills all prompts at once; None when they need several."""
    batch, length = timing.point.batch, timing.point.input_tokens
    if batch * length > batched_tokens:
        return None
    pairs = batch * length * (length + 1) / 2
    return Step(batch * length, pairs, timing.setting.layers, timing.ttft_last_s)


def _first_step(timings: Sequence[Timing]) -> Step:
    """When every load needed several steps: the first of the smallest, as if all were alike."""
    timing = min(timings, key=lambda t: t.point.batch * t.point.input_tokens)
    tokens = timing.point.batch * timing.point.input_tokens
    return Step(tokens, 0.0, timing.setting.layers, timing.ttft_last_s)


def _hop_s(calibration: Calibration, pipelines: Sequence[Timing]) -> float | None:
    """Median excess over the sum of the stages, by boundary, of batches that do not overlap with others."""
    found = []
    for timing in pipelines:
        alone = timing.point.batch * timing.point.input_tokens <= calibration.batched_tokens
        times = calibration.times.get(Cut.of(timing.setting))
        if alone and times is not None:
            step = decode_step(timing)
            layers = times.decode.layers_s(step.layers, step.work, step.pairs)
            hops = len(timing.setting.layers_per_stage) - 1
            found.append((timing.tpot_s - layers - times.decode.rest_s(step.work)) / hops)
    return max(0.0, sorted(found)[len(found) // 2]) if found else None
