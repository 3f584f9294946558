"""From steps of stages to TTFT and TPOT: what vLLM's scheduler makes of a burst of equal requests.

A batch passes the stages one after the other. vLLM fills prompts in steps of at most `batched_tokens` and
keeps as many steps in flight as there are stages; requests whose prompts were filled in steps of the same
turn go on decoding together. With such groups j of b_j sequences in flight, a token takes

    max( max over j of sum over stages s of t_s(b_j) + hops,  max over s of sum over j of t_s(b_j),  J turn )

so the slowest stage sets the pace under load, and only there does it matter how layers are split. (MaverIQ's
section 3.2 finds that it never matters: it looked at one group.) With several groups the host hides nothing
of its own part, a `turn` for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from profiler.physical.calibration import Calibration, Cut, CutTimes
from profiler.types import Workload

Floats = npt.NDArray[np.float64]
MOST_STEPS = 16  # told apart
MOST_FOLLOWED = 2048


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
    fills = fill_steps(workload, calibration.batched_tokens, len(layers))
    ends = _ends_s(calibration, times, layers, workload, fills)
    total = np.zeros(len(splits))
    for fill, (mean, _) in zip(fills, ends, strict=True):
        total += fill.requests * mean
    tpot_s = _decode_s(times, layers, workload, calibration)
    return Latencies(total / workload.batch, ends[-1][1], tpot_s)


@dataclass(frozen=True)
class Fill:
    """`count` steps that fill prompts, alike: the tokens of each, how many prompts they end together, and the
    sequences that decode along in each."""

    tokens: float
    requests: float
    decoding: float = 0.0
    count: int = 1


def fill_steps(workload: Workload, batched_tokens: int, stages: int = 1) -> list[Fill]:
    """In the order they run, at most MOST_STEPS of them: neighbours are taken together."""
    steps = _steps(workload, batched_tokens, stages)
    each = math.ceil(len(steps) / MOST_STEPS)
    return [_together(steps[i : i + each]) for i in range(0, len(steps), each)]


def _together(steps: Sequence[Fill]) -> Fill:
    count = len(steps)
    return Fill(
        sum(step.tokens for step in steps) / count,
        sum(step.requests for step in steps),
        sum(step.decoding for step in steps) / count,
        count,
    )


@lru_cache(maxsize=4096)
def _steps(workload: Workload, batched_tokens: int, stages: int) -> tuple[Fill, ...]:
    """Each step has room for the tokens that its turn's sequences decode, then for prompts. Turns follow one
    another, as many as there are stages."""
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    found, filled, decoding = list[Fill](), 0, [0] * stages
    while filled < total:
        turn = len(found) % stages
        if len(found) >= MOST_FOLLOWED:  # the rest are like the last
            steps = math.ceil((total - filled) / found[-1].tokens)
            ended = workload.batch - sum(fill.requests for fill in found)
            rest = Fill((total - filled) / steps, ended / steps, found[-1].decoding)
            return (*found, *[rest] * steps)
        tokens = min(total - filled, max(1, batched_tokens - decoding[turn]))
        ended = (filled + tokens) // length - filled // length
        found.append(Fill(tokens, ended, decoding[turn]))
        filled += tokens
        decoding[turn] += ended
    return tuple(found)


def _ends_s(
    calibration: Calibration, times: CutTimes, layers: Floats, workload: Workload, fills: Sequence[Fill]
) -> list[tuple[Floats, Floats]]:
    """When each fill has passed all stages: of several alike the mean, and the last.

    `layers` are [stages, splits]. A stage takes one step after the other. As many are in flight as there are
    stages: the next one waits until the host has the oldest one's tokens and has prepared it.
    """
    stages, total, begun = len(layers), workload.batch * workload.input_tokens, 0
    all_pairs = total * (workload.input_tokens + 1) / 2
    free, ends = np.full_like(layers, times.prefill.once_s), []
    for fill in fills:
        taken = _stages_s(
            layers, fill.tokens + fill.decoding, all_pairs * fill.tokens / total, times, prefill=True
        )
        taken += layers * times.prefill.along_pair_s * fill.decoding * workload.input_tokens
        taken[-1] += times.prefill.along_s * fill.decoding
        wait_s = calibration.refill_s * (begun >= stages > 1)
        at, more_s = free[0] + wait_s, (fill.count - 1) * (taken.max(axis=0) + wait_s)
        for stage, seconds in enumerate(taken):
            at = np.maximum(at, free[stage] + wait_s) + seconds
            free[stage] = at + more_s
            at = at + calibration.hop_s * (stage < stages - 1)
        ends.append((at + more_s / 2, at + more_s))
        begun += fill.count
    return ends


def groups_of(workload: Workload, batched_tokens: int, stages: int) -> list[int]:
    """Sequences in each group that decodes on; once there are more fills than stages they even out."""
    fills = _steps(workload, batched_tokens, stages)
    if len(fills) <= stages:
        return [int(fill.requests) for fill in fills if fill.requests]
    count = min(stages, workload.batch)
    return [workload.batch // count + (turn < workload.batch % count) for turn in range(count)]


def _decode_s(times: CutTimes, layers: Floats, workload: Workload, calibration: Calibration) -> Floats:
    context = workload.input_tokens + workload.output_tokens / 2
    groups = groups_of(workload, calibration.batched_tokens, len(layers))
    taken = np.array([_stages_s(layers, b, b * context, times, prefill=False) for b in groups])
    one_after_the_other = taken.sum(axis=1).max(axis=0) + calibration.hop_s * (len(layers) - 1)
    slowest = taken.sum(axis=0).max(axis=0)
    turns = len(groups) * calibration.turn_s if len(groups) > 1 else 0.0
    found: Floats = np.maximum(np.maximum(one_after_the_other, slowest), turns)
    return found


def _stages_s(layers: Floats, work: float, pairs: float, times: CutTimes, *, prefill: bool) -> Floats:
    """[stages, splits]. What does not depend on depth, head and sampling, is the last stage's."""
    step = times.prefill if prefill else times.decode
    taken = layers * step.layers_s(1, work, pairs)
    taken[-1] += step.rest_s(work)
    return taken
