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

MOST_STEPS = 16  # told apart
MOST_FOLLOWED = 2048
LEAST_ROOM = 1 / 16  # of a step, for prompts: no engine is set up to run more sequences at once


@dataclass(frozen=True)
class Fill:
    """`count` steps that fill prompts, alike: the tokens of each, the pairs of tokens that attend to each
    other, how many prompts they end together, and the sequences that decode along in each. `telling`: which
    share of the steps ends with tokens for somebody."""

    tokens: float
    pairs: float
    requests: float
    decoding: float = 0.0
    count: int = 1
    telling: float = 1.0

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
class Filling:
    """At most MOST_STEPS fills in the order they run (neighbours are taken together), and how many sequences
    go on decoding in each group afterwards."""

    fills: tuple[Fill, ...]
    groups: tuple[int, ...]

    @property
    def telling(self) -> float:
        """How many of the steps end with tokens for somebody; the last one does."""
        return sum(fill.count * fill.telling for fill in self.fills)


@lru_cache(maxsize=512)
def filling(workload: Workload, batched_tokens: int, stages: int = 1) -> Filling:
    steps = _followed(workload, batched_tokens, stages)
    left = workload.batch * workload.input_tokens - sum(int(step.tokens) for step in steps)
    rest = [_rest(workload, steps, left, batched_tokens, stages)] if left else []
    each = math.ceil(len(steps) / (MOST_STEPS - len(rest)))
    together = [_together(steps[i : i + each]) for i in range(0, len(steps), each)]
    fills = (*together, *rest)
    count = sum(fill.count for fill in fills)
    return Filling(fills, tuple(_groups(workload.batch, steps, count, stages)))


def _followed(workload: Workload, batched_tokens: int, stages: int) -> list[Fill]:
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    found, filled, decoding = list[Fill](), 0, [0.0] * stages
    while filled < total and len(found) < MOST_FOLLOWED:
        turn, begun = len(found) % stages, len(found) - stages * workload.output_tokens
        if begun >= 0:
            decoding[turn] -= found[begun].requests  # they have all of their tokens
        tokens = min(total - filled, _room(batched_tokens, decoding[turn]))
        ended = (filled + tokens) // length - filled // length
        pairs = _pairs(filled + tokens, length) - _pairs(filled, length)
        telling = float(ended + decoding[turn] > 0)
        found.append(Fill(tokens, pairs, ended, decoding[turn], telling=telling))
        filled += tokens
        decoding[turn] += ended
    return found


def _pairs(tokens: int, length: int) -> float:
    """Of the first `tokens` of prompts of `length`, one after the other."""
    whole, rest = divmod(tokens, length)
    return (whole * length * (length + 1) + rest * (rest + 1)) / 2


def _room(batched_tokens: int, decoding: float) -> int:
    return max(int(batched_tokens - decoding), math.ceil(batched_tokens * LEAST_ROOM))


def _rest(workload: Workload, steps: Sequence[Fill], left: int, batched_tokens: int, stages: int) -> Fill:
    """What comes after the steps that were followed: sequences go on to become as many as ever decode."""
    requests = workload.batch - sum(step.requests for step in steps)
    ending = requests * steps[-1].tokens / left  # by step
    most = min(workload.batch / stages, ending * workload.output_tokens)
    decoding = (steps[-1].decoding + most) / 2
    count = math.ceil(left / _room(batched_tokens, decoding))
    length, total = workload.input_tokens, workload.batch * workload.input_tokens
    pairs = _pairs(total, length) - _pairs(total - left, length)
    telling = min(1.0, requests / count + decoding)
    return Fill(left / count, pairs / count, requests, decoding, count, telling)


def _together(steps: Sequence[Fill]) -> Fill:
    count = len(steps)
    return Fill(
        sum(step.tokens for step in steps) / count,
        sum(step.pairs for step in steps) / count,
        sum(step.requests for step in steps),
        sum(step.decoding for step in steps) / count,
        count,
        sum(step.telling for step in steps) / count,
    )


def _groups(batch: int, steps: Sequence[Fill], count: int, stages: int) -> list[int]:
    """Once there are more fills than stages they even out."""
    if count <= stages:
        return [int(step.requests) for step in steps if step.requests]
    groups = min(stages, batch)
    return [batch // groups + (group < batch % groups) for group in range(groups)]
