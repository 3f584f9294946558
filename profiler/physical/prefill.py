"""How vLLM fills the prompts of equal requests that arrive at once, step by step. Pure.

Each step has room for the tokens that its turn's sequences decode, then for prompts, in the order of
requests. Turns follow one another, as many as there are stages; whose prompt has ended decodes in later steps
of its turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from profiler.physical.curves import Part
from profiler.types import Workload

MAX_STEPS = 16  # kept apart; beyond that, neighbours are merged
MAX_FOLLOWED = 2048
MIN_ROOM = 1 / 16  # of a step, for prompts: no engine is set up to run more sequences at once


@dataclass(frozen=True)
class PrefillSteps:
    """`count` prefill steps, alike: the tokens of each, the pairs of tokens that attend to each
    other, how many prompts they end together, and the sequences that decode along in each. `reporting`: which
    share of the steps ends with tokens for somebody."""

    tokens: float
    pairs: float
    requests: float
    decoding: float = 0.0
    count: int = 1
    reporting: float = 1.0

    def part(self, input_tokens: int, is_first: bool, weight: float = 1.0) -> Part:
        """Its steps, as the fit and predictions see them, where prompts have `input_tokens`."""
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
    """At most MAX_STEPS steps in the order they run (neighbours are taken together), and how many sequences
    go on decoding in each group afterwards."""

    steps: tuple[PrefillSteps, ...]
    groups: tuple[int, ...]

    @property
    def reporting(self) -> float:
        """How many of the steps end with tokens for somebody; the last one does."""
        return sum(prefill_step.count * prefill_step.reporting for prefill_step in self.steps)


@lru_cache(maxsize=512)
def split_prefill(workload: Workload, batched_tokens: int, stages: int = 1) -> Prefill:
    steps = _followed(workload, batched_tokens, stages)
    left = workload.batch * workload.input_tokens - sum(int(step.tokens) for step in steps)
    rest = [_rest(workload, steps, left, batched_tokens, stages)] if left else []
    each = math.ceil(len(steps) / (MAX_STEPS - len(rest)))
    together = [_together(steps[i : i + each]) for i in range(0, len(steps), each)]
    prefill_steps = (*together, *rest)
    count = sum(prefill_step.count for prefill_step in prefill_steps)
    return Prefill(prefill_steps, tuple(_groups(workload.batch, steps, count, stages)))


def _followed(workload: Workload, batched_tokens: int, stages: int) -> list[PrefillSteps]:
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    steps, filled, decoding = list[PrefillSteps](), 0, [0.0] * stages
    while filled < total and len(steps) < MAX_FOLLOWED:
        turn, begun = len(steps) % stages, len(steps) - stages * workload.output_tokens
        if begun >= 0:
            decoding[turn] -= steps[begun].requests  # they have all of their tokens
        tokens = min(total - filled, _room(batched_tokens, decoding[turn]))
        ended = (filled + tokens) // length - filled // length
        pairs = _pairs(filled + tokens, length) - _pairs(filled, length)
        reporting = float(ended + decoding[turn] > 0)
        steps.append(PrefillSteps(tokens, pairs, ended, decoding[turn], reporting=reporting))
        filled += tokens
        decoding[turn] += ended
    return steps


def _pairs(tokens: int, length: int) -> float:
    """Of the first `tokens` of prompts of `length`, one after the other."""
    whole, rest = divmod(tokens, length)
    return (whole * length * (length + 1) + rest * (rest + 1)) / 2


def _room(batched_tokens: int, decoding: float) -> int:
    return max(int(batched_tokens - decoding), math.ceil(batched_tokens * MIN_ROOM))


def _rest(
    workload: Workload, steps: Sequence[PrefillSteps], left: int, batched_tokens: int, stages: int
) -> PrefillSteps:
    """What comes after the steps that were followed: sequences go on to become as many as ever decode."""
    requests = workload.batch - sum(step.requests for step in steps)
    ending = requests * steps[-1].tokens / left  # by step
    most = min(workload.batch / stages, ending * workload.output_tokens)
    decoding = (steps[-1].decoding + most) / 2
    count = math.ceil(left / _room(batched_tokens, decoding))
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    pairs = _pairs(total, length) - _pairs(total - left, length)
    reporting = min(1.0, requests / count + decoding)
    return PrefillSteps(left / count, pairs / count, requests, decoding, count, reporting)


def _together(steps: Sequence[PrefillSteps]) -> PrefillSteps:
    count = len(steps)
    return PrefillSteps(
        sum(step.tokens for step in steps) / count,
        sum(step.pairs for step in steps) / count,
        sum(step.requests for step in steps),
        sum(step.decoding for step in steps) / count,
        count,
        sum(step.reporting for step in steps) / count,
    )


def _groups(batch: int, steps: Sequence[PrefillSteps], count: int, stages: int) -> list[int]:
    """Once there are more prefill steps than stages they even out."""
    if count <= stages:
        return [int(step.requests) for step in steps if step.requests]
    groups = min(stages, batch)
    return [batch // groups + (group < batch % groups) for group in range(groups)]
