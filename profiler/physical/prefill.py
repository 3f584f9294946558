"""How vLLM fills the prompts of equal requests that arrive at once, step by step. Pure.

Each step has room for the tokens that its turn's sequences decode, then for prompts, in the order of
requests. There are as many turns as stages, one after the other. A request whose prompt has ended decodes in
later steps of its turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from profiler.physical.curves import Part
from profiler.types import Workload

MAX_STEPS = 16  # kept separately; neighbours are merged beyond that
MAX_FOLLOWED = 2048
MIN_ROOM = 1 / 16  # of a step, for prompts: no engine is set up to run more sequences at once


@dataclass(frozen=True)
class PrefillSteps:
    """`count` equal prefill steps. For each step: its tokens, the pairs of tokens that attend to each other,
    and the sequences that also decode. `requests`: the prompts that all the steps end. `reporting`: the share
    of the steps that end with a token for any request. `begun`: the mean number of requests that have their
    first token but not their last one until such a step ends."""

    tokens: float
    pairs: float
    requests: float
    decoding: float = 0.0
    count: int = 1
    reporting: float = 1.0
    begun: float = 0.0

    def part(self, input_tokens: int, is_first: bool, weight: float = 1.0) -> Part:
        """The steps in the form of the fit and of predictions, for prompts of `input_tokens`."""
        count = self.count * weight
        return Part(
            self.tokens + self.decoding,
            self.pairs,
            count,
            count - is_first,
            self.decoding,
            self.decoding * input_tokens,
        )


@dataclass(frozen=True)
class Prefill:
    """At most MAX_STEPS steps in their order (neighbours are merged), and how many sequences of each group
    decode afterwards. `last_groups`: the mean of this number until the last request ends; requests that began
    first end first."""

    steps: tuple[PrefillSteps, ...]
    groups: tuple[float, ...]
    last_groups: tuple[float, ...]

    @property
    def reporting(self) -> float:
        """The number of steps that end with a token for any request; the last step does."""
        return sum(prefill_step.count * prefill_step.reporting for prefill_step in self.steps)


@lru_cache(maxsize=512)
def split_prefill(workload: Workload, batched_tokens: int, stages: int = 1) -> Prefill:
    steps = _followed(workload, batched_tokens, stages)
    left = workload.batch * workload.input_tokens - sum(int(step.tokens) for step in steps)
    rest = [_rest(workload, steps, left, batched_tokens, stages)] if left else []
    each = math.ceil(len(steps) / (MAX_STEPS - len(rest)))
    together = [_together(steps[i : i + each]) for i in range(0, len(steps), each)]
    prefill_steps = (*together, *rest)
    return Prefill(prefill_steps, *_groups(workload, steps, prefill_steps, stages))


def step_tokens(workload: Workload, batched_tokens: int) -> frozenset[int]:
    """The token counts of steps that fill prompts on one stage, including tokens of requests that decode."""
    return frozenset(int(step.tokens + step.decoding) for step in _followed(workload, batched_tokens, 1))


def _followed(workload: Workload, batched_tokens: int, stages: int) -> list[PrefillSteps]:
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    steps, filled, decoding = list[PrefillSteps](), 0, [0.0] * stages
    begun, last = 0.0, stages * (workload.output_tokens - 1)  # requests; steps from first to last token
    while filled < total and len(steps) < MAX_FOLLOWED:
        turn, ended_with = len(steps) % stages, len(steps) - stages * workload.output_tokens
        if ended_with >= 0:
            decoding[turn] -= steps[ended_with].requests  # they have all of their tokens
        tokens = min(total - filled, _room(batched_tokens, decoding[turn]))
        ended = (filled + tokens) // length - filled // length
        pairs = _pairs(filled + tokens, length) - _pairs(filled, length)
        reporting = float(ended + decoding[turn] > 0)
        steps.append(PrefillSteps(tokens, pairs, ended, decoding[turn], 1, reporting, begun))
        filled += tokens
        decoding[turn] += ended
        begun += ended
        if len(steps) > last:
            begun -= steps[len(steps) - 1 - last].requests
    return steps


def _pairs(tokens: int, length: int) -> float:
    """Pairs in the first `tokens` of consecutive prompts of `length`."""
    whole, rest = divmod(tokens, length)
    return (whole * length * (length + 1) + rest * (rest + 1)) / 2


def _room(batched_tokens: int, decoding: float) -> int:
    return max(int(batched_tokens - decoding), math.ceil(batched_tokens * MIN_ROOM))


def _rest(
    workload: Workload, steps: Sequence[PrefillSteps], left: int, batched_tokens: int, stages: int
) -> PrefillSteps:
    """The steps after the simulated ones; decoding sequences continue to grow up to their maximum."""
    requests = workload.batch - sum(step.requests for step in steps)
    ending = requests * steps[-1].tokens / left  # by step
    most = min(workload.batch / stages, ending * workload.output_tokens)
    decoding = (steps[-1].decoding + most) / 2
    count = math.ceil(left / _room(batched_tokens, decoding))
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    pairs = _pairs(total, length) - _pairs(total - left, length)
    reporting = min(1.0, requests / count + decoding)
    return PrefillSteps(
        left / count,
        pairs / count,
        requests,
        decoding,
        count,
        reporting,
        min(workload.batch, decoding * stages),
    )


def _together(steps: Sequence[PrefillSteps]) -> PrefillSteps:
    count = len(steps)
    return PrefillSteps(
        sum(step.tokens for step in steps) / count,
        sum(step.pairs for step in steps) / count,
        sum(step.requests for step in steps),
        sum(step.decoding for step in steps) / count,
        count,
        sum(step.reporting for step in steps) / count,
        sum(step.begun for step in steps) / count,
    )


def _groups(
    workload: Workload, followed: Sequence[PrefillSteps], prefill: Sequence[PrefillSteps], stages: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The groups after the last prompt, and their mean sizes. With more prefill steps than stages the groups
    become equal."""
    count = sum(step.count for step in prefill)
    if count <= stages:
        ended = tuple(float(step.requests) for step in followed if step.requests)
        return ended, ended
    more = workload.output_tokens - 1
    still = _still_decoding(prefill, stages * more)
    groups = int(max(1.0, min(stages, still)))
    left = workload.batch * more - sum(step.count * step.decoding for step in prefill)
    mean = min(still, max(1.0, left / more)) if more else still
    return (still / groups,) * groups, (mean / groups,) * groups


def _still_decoding(prefill: Sequence[PrefillSteps], steps: int) -> float:
    """The number of requests whose prompts ended in the last `steps` steps."""
    still, left = 0.0, float(max(1, steps))
    for step in reversed(prefill):
        share = min(step.count, left) / step.count
        still, left = still + share * step.requests, left - share * step.count
        if left <= 0.0:
            break
    return max(1.0, still)
