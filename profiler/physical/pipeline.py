"""From steps of stages to TTFT and TPOT: what vLLM's scheduler makes of a burst of equal requests.

A batch passes the stages one after the other. vLLM fills prompts in steps of at most `batched_tokens` and
keeps as many steps in flight as there are stages; requests whose prompts were filled in the same step go
on decoding together. With such groups j of b_j sequences in flight, a token takes

    max( max over j of sum over stages s of t_s(b_j) + hops,   max over s of sum over j of t_s(b_j) )

so the slowest stage sets the pace under load, and only there does it matter how layers are split. (MaverIQ's
section 3.2 finds that it never matters: it looked at one group.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiler.physical.calibration import Calibration, Cut, CutTimes
from profiler.types import Workload

Floats = npt.NDArray[np.float64]
MOST_STEPS = 16  # followed one by one; the rest are taken for alike


@dataclass(frozen=True)
class Latency:
    """Seconds. `ttft_s` is the mean over the requests, `ttft_last_s` that of the last."""

    ttft_s: float
    ttft_last_s: float
    tpot_s: float

    def total_s(self, output_tokens: int) -> float:
        return self.ttft_last_s + self.tpot_s * max(0, output_tokens - 1)


@dataclass(frozen=True)
class Latencies:
    """As `Latency`, of many splits: each [splits]."""

    ttft_s: Floats
    ttft_last_s: Floats
    tpot_s: Floats


def latency(
    calibration: Calibration, cut: Cut, layers_per_stage: Sequence[int], workload: Workload
) -> Latency:
    """Of `workload.batch` requests that arrive at once at an idle engine. Raises KeyError (`at`)."""
    found = latencies(calibration, cut, np.array([layers_per_stage]), workload)
    return Latency(float(found.ttft_s[0]), float(found.ttft_last_s[0]), float(found.tpot_s[0]))


def latencies(
    calibration: Calibration, cut: Cut, splits: npt.NDArray[np.int_], workload: Workload
) -> Latencies:
    """`latency` of each of `splits`, [splits, stages] in layers. Raises KeyError."""
    times, layers = calibration.at(cut), splits.T.astype(np.float64)
    fills = fill_steps(workload, calibration.batched_tokens)
    ends = _ends_s(times, layers, workload, fills, calibration.hop_s)
    total = np.zeros(len(splits))
    for fill, (mean, _) in zip(fills, ends, strict=True):
        total += fill.requests * mean
    groups = _groups(workload.batch, fills, len(layers))
    tpot_s = _decode_s(times, layers, workload, groups, calibration.hop_s)
    return Latencies(total / workload.batch, ends[-1][1], tpot_s)


@dataclass(frozen=True)
class Fill:
    """One step, or `count` like it, that fills prompts: its tokens, and how many prompts it (they) ends."""

    tokens: float
    requests: float
    count: int = 1


def fill_steps(workload: Workload, batched_tokens: int) -> list[Fill]:
    """In the order they run: full steps, then what is left."""
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    steps = math.ceil(total / batched_tokens)
    if steps > MOST_STEPS:
        tokens = total / steps
        alike = Fill(tokens, workload.batch / steps)
        return [alike, Fill(tokens, workload.batch - alike.requests, steps - 1)]
    marks = [min(total, step * batched_tokens) for step in range(steps + 1)]
    return [Fill(end - begin, end // length - begin // length) for begin, end in itertools.pairwise(marks)]


def _ends_s(
    times: CutTimes, layers: Floats, workload: Workload, fills: Sequence[Fill], hop_s: float
) -> list[tuple[Floats, Floats]]:
    """When each fill has passed all stages: of several alike the mean, and the last.

    `layers` are [stages, splits]. A stage takes one step after the other. Requests whose prompts are filled
    decode along with the next ones' in the steps that begin when theirs has ended, one in as many as there
    are stages.
    """
    stages, total = len(layers), workload.batch * workload.input_tokens
    all_pairs = total * (workload.input_tokens + 1) / 2
    free, ends, decoding, begun = np.zeros_like(layers), [], 0.0, 0
    for fill in fills:
        along = (decoding + fill.requests * (fill.count > 1) / 2) / stages
        along *= begun + fill.count > stages  # else the others' steps are still in flight
        pairs = all_pairs * fill.tokens / total + along * workload.input_tokens
        taken = _stages_s(layers, fill.tokens + along, pairs, times, prefill=True)
        at, more_s = np.zeros_like(free[0]), (fill.count - 1) * taken.max(axis=0)
        for stage, seconds in enumerate(taken):
            at = np.maximum(at, free[stage]) + seconds
            free[stage] = at + more_s
            at = at + hop_s * (stage < stages - 1)
        ends.append((at + more_s / 2, at + more_s))
        decoding += fill.requests
        begun += fill.count
    return ends


def _groups(batch: int, fills: Sequence[Fill], stages: int) -> list[float]:
    """Sequences in each group that decodes on; with as many fills as stages or more they even out."""
    if sum(fill.count for fill in fills) > stages:
        return [batch / stages] * min(stages, batch)
    return [fill.requests for fill in fills if fill.requests]


def _decode_s(
    times: CutTimes, layers: Floats, workload: Workload, groups: Sequence[float], hop_s: float
) -> Floats:
    context = workload.input_tokens + workload.output_tokens / 2
    taken = np.array([_stages_s(layers, b, b * context, times, prefill=False) for b in groups])
    one_after_the_other = taken.sum(axis=1).max(axis=0) + hop_s * (len(layers) - 1)
    slowest = taken.sum(axis=0).max(axis=0)
    found: Floats = np.maximum(one_after_the_other, slowest)
    return found


def _stages_s(layers: Floats, work: float, pairs: float, times: CutTimes, *, prefill: bool) -> Floats:
    """[stages, splits]. What does not depend on depth, head and sampling, is the last stage's."""
    step = times.prefill if prefill else times.decode
    taken = layers * step.layers_s(1, work, pairs)
    taken[-1] += step.rest_s(work)
    return taken
