"""TTFT and TPOT from stages' steps: how vLLM's scheduler runs a burst of equal requests.

A batch passes the stages one after the other. vLLM fills prompts in steps of at most `batched_tokens` and
keeps as many steps in flight as there are stages. Requests whose prompts were filled in steps of the same
turn then decode together. With such groups j of b_j sequences in flight, a token takes

    max( max over j of sum over s of t_s(b_j) + hops,  max over s of sum over j of (t_s + g_s)(b_j),  J turn )

where g_s is the time of a stage s between two steps, outside of its layers (the last stage's is in t_s). So
the slowest stage sets the pace under load; only then does the split of layers matter. (MaverIQ's section 3.2
finds that it never matters, from measurements of one group.) With several groups the host cannot hide its own
part, a `turn` for each group. While prompts are filled, every stage except the last loses a share of its pace
until the tokens of its previous step have come.

A client's TPOT is longer than this: a request whose prompt was filled early waits between its tokens for
other prompts. The times between first and last tokens, summed over all requests, are the number of requests
that have begun and not ended, summed over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from profiler.physical.calibration import Calibration, Cut
from profiler.physical.curves import StepTime
from profiler.physical.prefill import Prefill, PrefillSteps, split_prefill
from profiler.types import Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Latency:
    """Seconds. `ttft_s` and `tpot_s` are means over the requests, `ttft_last_s` is the last request's TTFT,
    and `step_s` a token's time while no prompts are filled."""

    ttft_s: float
    ttft_last_s: float
    tpot_s: float
    step_s: float


@dataclass(frozen=True)
class Latencies:
    """As `Latency`, for many splits: each [splits]. `last_step_s`: as `step_s`, but the mean until the last
    request ends. `in_turns`: the host's turns decide a step's time. `turns_most_s`: the upper bound of turns
    if none was measured."""

    ttft_s: Floats
    ttft_last_s: Floats
    tpot_s: Floats
    step_s: Floats
    last_step_s: Floats
    in_turns: npt.NDArray[np.bool_]
    turns_most_s: float


def latency(
    calibration: Calibration, cut: Cut, layers_per_stage: Sequence[int], workload: Workload
) -> Latency:
    """The latency of `workload.batch` requests that arrive at once at an idle engine. Raises KeyError
    (`at`)."""
    figures = latencies(calibration, cut, np.array([layers_per_stage]), workload)
    each = figures.ttft_s, figures.ttft_last_s, figures.tpot_s, figures.step_s
    return Latency(*(float(seconds[0]) for seconds in each))


class AddedTime(Protocol):
    """Seconds that variants add to each layer."""

    def decode_s(self, sequences: float) -> float: ...

    def prefill_s(self, step: PrefillSteps) -> float: ...


class Nothing:
    """The added time of a batch without variants."""

    def decode_s(self, sequences: float) -> float:
        return 0.0

    def prefill_s(self, step: PrefillSteps) -> float:
        return 0.0


NOTHING = Nothing()


def latencies(
    calibration: Calibration,
    cut: Cut,
    splits: npt.NDArray[np.int_],
    workload: Workload,
    variants: AddedTime = NOTHING,
) -> Latencies:
    """`latency` of each of `splits`, [splits, stages] in layers, with `variants`. Raises KeyError."""
    layers = splits.T.astype(np.float64)
    prefill = split_prefill(workload, calibration.batched_tokens, len(layers))
    ends = _ends_s(calibration, cut, layers, workload.input_tokens, prefill.steps, variants)
    total = np.zeros(len(splits))
    for prefill_step, (mean, _) in zip(prefill.steps, ends, strict=True):
        total += prefill_step.requests * mean
    turns = len(prefill.groups) if len(prefill.groups) > 1 else 0
    turns_s, most_s = turns * calibration.turn_s, turns * calibration.turn_most_s
    decode_s, last_s = (
        _decode_s(calibration, cut, layers, workload, groups, variants)
        for groups in (prefill.groups, prefill.last_groups)
    )
    step_s = np.maximum(decode_s, turns_s)
    return Latencies(
        total / workload.batch,
        ends[-1][1],
        _seen_s(workload, prefill, [last for _, last in ends], step_s),
        step_s,
        np.maximum(last_s, turns_s),
        decode_s < turns_s,
        most_s,
    )


@dataclass(frozen=True)
class Seen:
    """The mean TTFT and TPOT of a burst, seconds."""

    ttft_s: float
    tpot_s: float


def seen_of_pass(workload: Workload, batched_tokens: int, pass_s: float, step_s: float) -> Seen:
    """TTFT and TPOT if only the time of one pass through all prompts is known: each step takes a part in
    proportion to its tokens."""
    prefill, at_s = split_prefill(workload, batched_tokens), 0.0
    ends_s, total_s = [], 0.0
    for step in prefill.steps:
        taken_s = pass_s * step.tokens * step.count / (workload.batch * workload.input_tokens)
        share = (step.count + 1) / (2 * step.count)  # the mean of several equal steps
        total_s += step.requests * (at_s + share * taken_s)
        at_s += taken_s
        ends_s.append(np.array([at_s]))
    seen_s = _seen_s(workload, prefill, ends_s, np.array([step_s]))
    return Seen(total_s / workload.batch, float(seen_s[0]))


def _seen_s(workload: Workload, prefill: Prefill, ends_s: Sequence[Floats], step_s: Floats) -> Floats:
    """The time that clients see between two tokens, as a mean over all tokens: the waits while prompts are
    filled, and then `step_s` for each remaining token."""
    tokens = workload.batch * (workload.output_tokens - 1)
    if not tokens:
        return step_s
    waited_s, left, before_s = np.zeros_like(step_s), float(tokens), np.zeros_like(step_s)
    for step, end_s in zip(prefill.steps, ends_s, strict=True):
        waited_s += step.begun * (end_s - before_s)
        left -= step.count * step.decoding
        before_s = end_s
    for sequences, end_s in zip(prefill.groups, _last_ends_s(prefill, ends_s), strict=True):
        # For these the next token was already on its way when the last prompt's step ended.
        waited_s -= sequences * np.minimum(step_s, ends_s[-1] - end_s)
    seen_s: Floats = (waited_s + max(0.0, left) * step_s) / tokens
    return seen_s


def _last_ends_s(prefill: Prefill, ends_s: Sequence[Floats]) -> list[Floats]:
    """The end times of the last steps, one for each group."""
    found, before = list[Floats](), [np.zeros_like(ends_s[0]), *ends_s]
    for step, began_s, end_s in zip(prefill.steps[::-1], before[-2::-1], ends_s[::-1], strict=True):
        pace_s = (end_s - began_s) / step.count
        found += [end_s - pace_s * back for back in range(min(step.count, len(prefill.groups) - len(found)))]
    return found[::-1]


def _ends_s(
    calibration: Calibration,
    cut: Cut,
    layers: Floats,
    input_tokens: int,
    prefill_steps: Sequence[PrefillSteps],
    variants: AddedTime,
) -> list[tuple[Floats, Floats]]:
    """When each prefill step has passed all stages: for several equal steps the mean time and the last.

    `layers` are [stages, splits]. A stage runs one step after the other. As many steps are in flight as there
    are stages: the next step waits for the oldest step's tokens. Every stage except the last loses a share of
    its pace (`Calibration.lost_pace`) until the last earlier step that ends with tokens has passed all
    stages.
    """
    times, stages, lost = calibration.at(cut), len(layers), calibration.lost_pace_at(cut)
    free, ends, landed = np.full_like(layers, times.prefill.once_s), [], list[Floats]()
    reported_s, reporting = np.zeros(layers.shape[1]), 0.0
    for number, prefill_step in enumerate(prefill_steps):
        part = prefill_step.part(input_tokens, not number)
        first = _stages_s(layers, part.work, part.pairs, times.prefill)
        first += layers * (times.prefill.along_pair_s * part.along_pairs + variants.prefill_s(prefill_step))
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
    """The time between the ends of equal steps. `taken` is [stages, splits], and the share `reporting` of the
    steps ends with tokens. A step's tokens come after as many steps as there are later stages."""
    later = np.arange(len(taken))[::-1, None]
    until_s = np.cumsum(taken[::-1], axis=0)[::-1] - taken + hop_s * later
    slowed = taken + _lost_s(taken, until_s, lost * np.minimum(1.0, reporting * later))
    turn_s = (slowed.sum(axis=0) + (len(taken) - 1) * hop_s) / len(taken)
    pace_s: Floats = np.maximum(slowed.max(axis=0), turn_s)
    return pace_s


def _lost_s(taken: Floats, until_s: Floats, share: float | Floats) -> Floats:
    """The delay of steps of `taken` seconds that lose a share of their pace from their begin `until_s`."""
    lost_s: Floats = np.clip(until_s, 0.0, taken / (1 - share)) * share
    return lost_s


def _decode_s(
    calibration: Calibration,
    cut: Cut,
    layers: Floats,
    workload: Workload,
    groups: Sequence[float],
    variants: AddedTime,
) -> Floats:
    times = calibration.at(cut)
    context = workload.input_tokens + workload.output_tokens / 2
    taken = np.array(
        [_stages_s(layers, b, b * context, times.decode) + layers * variants.decode_s(b) for b in groups]
    )
    one_after_the_other = taken.sum(axis=1).max(axis=0) + calibration.hop_s * (len(layers) - 1)
    slowest = taken.sum(axis=0)
    slowest[:-1] += sum(times.gap_s(b) for b in groups)  # the last stage's gap is in its rest
    slowest = slowest.max(axis=0)
    token_s: Floats = np.maximum(one_after_the_other, slowest)
    return token_s


def _stages_s(layers: Floats, work: float, pairs: float, step: StepTime) -> Floats:
    """[stages, splits]. The part that does not depend on depth (head, sampling) belongs to the last stage."""
    taken = layers * step.layers_s(1, work, pairs)
    taken[-1] += step.rest_s(work)
    return taken
