"""From steps of stages to TTFT and TPOT: what vLLM's scheduler makes of a burst of equal requests.

A batch passes the stages one after the other. vLLM fills prompts in steps of at most `batched_tokens` and
keeps as many steps in flight as there are stages; requests whose prompts were filled in steps of the same
turn go on decoding together. With such groups j of b_j sequences in flight, a token takes

    max( max over j of sum over s of t_s(b_j) + hops,  max over s of sum over j of (t_s + g_s)(b_j),  J turn )

where g_s is what a stage s has between two steps beside its layers (the last one's is in t_s),
so the slowest stage sets the pace under load, and only there does it matter how layers are split. (MaverIQ's
section 3.2 finds that it never matters: it looked at one group.) With several groups the host hides nothing
of its own part, a `turn` for each. While prompts are filled, a stage but the last loses a share of its pace
until the tokens of its step before have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profiler.physical.calibration import Calibration, Cut, CutTimes
from profiler.physical.curves import StepTime
from profiler.physical.prefill import PrefillSteps, split_prefill
from profiler.types import Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """Seconds. `ttft_s` is the mean over the requests, `ttft_last_s` that of the last."""

    ttft_s: float
    ttft_last_s: float
    tpot_s: float


@dataclass(frozen=True)
class Latencies:
    """As `Latency`, of many splits: each [splits]. `in_turns`: the host's turns decide what TPOT is.
    `turns_most_s`: what they may take where none is known."""

    ttft_s: Floats
    ttft_last_s: Floats
    tpot_s: Floats
    in_turns: npt.NDArray[np.bool_]
    turns_most_s: float


def latency(
    calibration: Calibration, cut: Cut, layers_per_stage: Sequence[int], workload: Workload
) -> Latency:
    """The latency of `workload.batch` requests that arrive at once at an idle engine. Raises KeyError
    (`at`)."""
    figures = latencies(calibration, cut, np.array([layers_per_stage]), workload)
    return Latency(float(figures.ttft_s[0]), float(figures.ttft_last_s[0]), float(figures.tpot_s[0]))


def latencies(
    calibration: Calibration, cut: Cut, splits: npt.NDArray[np.int_], workload: Workload
) -> Latencies:
    """`latency` of each of `splits`, [splits, stages] in layers. Raises KeyError."""
    times, layers = calibration.at(cut), splits.T.astype(np.float64)
    prefill = split_prefill(workload, calibration.batched_tokens, len(layers))
    ends = _ends_s(calibration, cut, layers, workload.input_tokens, prefill.steps)
    total = np.zeros(len(splits))
    for prefill_step, (mean, _) in zip(prefill.steps, ends, strict=True):
        total += prefill_step.requests * mean
    decode_s = _decode_s(calibration, times, layers, workload, prefill.groups)
    turns = len(prefill.groups) if len(prefill.groups) > 1 else 0
    turns_s, most_s = turns * calibration.turn_s, turns * calibration.turn_most_s
    tpot_s = np.maximum(decode_s, turns_s)
    return Latencies(total / workload.batch, ends[-1][1], tpot_s, decode_s < turns_s, most_s)


def _ends_s(
    calibration: Calibration,
    cut: Cut,
    layers: Floats,
    input_tokens: int,
    prefill_steps: Sequence[PrefillSteps],
) -> list[tuple[Floats, Floats]]:
    """When each prefill step has passed all stages: of several alike the mean, and the last.

    `layers` are [stages, splits]. A stage takes one step after the other. As many are in flight as there are
    stages: the next one waits for the oldest one's tokens. A stage but the last loses a share of its pace
    (`Calibration.lost_pace`) until the last step before that ends with tokens has passed all stages.
    """
    times, stages, lost = calibration.at(cut), len(layers), calibration.lost_pace_at(cut)
    free, ends, landed = np.full_like(layers, times.prefill.once_s), [], list[Floats]()
    reported_s, reporting = np.zeros(layers.shape[1]), 0.0
    for number, prefill_step in enumerate(prefill_steps):
        part = prefill_step.part(input_tokens, not number)
        first = _stages_s(layers, part.work, part.pairs, times.prefill)
        first += layers * times.prefill.along_pair_s * part.along_pairs
        first[-1] += times.prefill.along_s * part.along
        taken = first + layers * times.prefill.later_s * part.work
        each_s = _paced_s(taken, calibration.hop_s, lost, prefill_step.reporting)
        more_s = (prefill_step.count - 1) * each_s
        at = np.maximum(free[0], landed[0]) if len(landed) == stages else free[0]
        for stage, seconds in enumerate(taken if number else first):
            at = np.maximum(at, free[stage])
            share = lost * reporting * (stage < stages - 1)
            at = at + seconds + _lost_s(seconds, reported_s - at, share)
            free[stage] = at + more_s
            at = at + calibration.hop_s * (stage < stages - 1)
        ends.append((at + more_s / 2, at + more_s))
        back = range(min(prefill_step.count, stages) - 1, -1, -1)
        if prefill_step.reporting:
            reported_s, reporting = at + more_s, prefill_step.reporting
        landed = [*landed, *(at + more_s - steps * each_s for steps in back)][-stages:]
    return ends


def _paced_s(taken: Floats, hop_s: float, lost: float, reporting: float) -> Floats:
    """How far apart steps that take as long end, of `taken` [stages, splits], of which `reporting` have
    tokens: those of one come after as many steps as there are later stages."""
    later = np.arange(len(taken))[::-1, None]
    until_s = np.cumsum(taken[::-1], axis=0)[::-1] - taken + hop_s * later
    slowed = taken + _lost_s(taken, until_s, lost * np.minimum(1.0, reporting * later))
    turn_s = (slowed.sum(axis=0) + (len(taken) - 1) * hop_s) / len(taken)
    pace_s: Floats = np.maximum(slowed.max(axis=0), turn_s)
    return pace_s


def _lost_s(taken: Floats, until_s: Floats, share: float | Floats) -> Floats:
    """By which steps of `taken` end later that lose a share of their pace from their begin `until_s`."""
    lost_s: Floats = np.clip(until_s, 0.0, taken / (1 - share)) * share
    return lost_s


def _decode_s(
    calibration: Calibration, times: CutTimes, layers: Floats, workload: Workload, groups: Sequence[int]
) -> Floats:
    context = workload.input_tokens + workload.output_tokens / 2
    taken = np.array([_stages_s(layers, b, b * context, times.decode) for b in groups])
    one_after_the_other = taken.sum(axis=1).max(axis=0) + calibration.hop_s * (len(layers) - 1)
    slowest = taken.sum(axis=0)
    slowest[:-1] += sum(times.gap_s(b) for b in groups)  # the last one's is in what it has beside layers
    slowest = slowest.max(axis=0)
    token_s: Floats = np.maximum(one_after_the_other, slowest)
    return token_s


def _stages_s(layers: Floats, work: float, pairs: float, step: StepTime) -> Floats:
    """[stages, splits]. What does not depend on depth, head and sampling, is the last stage's."""
    taken = layers * step.layers_s(1, work, pairs)
    taken[-1] += step.rest_s(work)
    return taken
