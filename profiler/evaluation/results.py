"""Figures of an evaluation, each with the interval that follows from its number of items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from profiler.evaluation.types import TaskKind

Z_95 = 1.959963984540054  # the normal distribution's 97.5 % point


class Metric(StrEnum):
    """`exact_match` and `multiple_choice`: the share of right items. `perplexity`: e to the mean surprise of
    a token. `kl`: nats per token between the reference's distribution and this model's."""

    EXACT_MATCH = "exact_match"
    MULTIPLE_CHOICE = "multiple_choice"
    PERPLEXITY = "perplexity"
    KL = "kl"

    @property
    def higher_is_better(self) -> bool:
        return self in {Metric.EXACT_MATCH, Metric.MULTIPLE_CHOICE}


METRIC_OF = {kind: Metric(kind.value) for kind in TaskKind}


@dataclass(frozen=True)
class Result:
    """One figure of one task. `low` to `high` is its 95 % interval over items drawn in the same way.

    `items` were asked; `tokens` were scored, for perplexity and KL. `reference` is the other model of a KL.
    `coverage` is the share of its probability mass that is known token by token. `digest` is the task's.
    """

    task: str
    metric: Metric
    value: float
    low: float
    high: float
    items: int
    tokens: int = 0
    reference: str = ""
    coverage: float = 1.0
    digest: str = ""


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


def proportion(right: int, count: int) -> Interval:
    """Wilson's score interval (1927), which stays within 0 to 1 and is valid near both ends.

    Errors: ValueError for no items.
    """
    if not 0 <= right <= count or count < 1:
        raise ValueError(f"expected 0 <= right <= count and a count of at least 1, got {right} of {count}")
    share, z2 = right / count, Z_95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    low = 0.0 if right == 0 else centre - half
    high = 1.0 if right == count else centre + half
    return Interval(share, low, high)


def mean_per_token(sums: Sequence[float], tokens: Sequence[int]) -> Interval:
    """sum(sums) / sum(tokens) over items; items are independent, tokens of one text are not.

    The interval is that of a ratio of two means (Cochran, Sampling Techniques, 3rd edition, equation 6.13),
    with a normal distribution; for one item it is infinite. Errors: ValueError without tokens.
    """
    count, total = len(sums), sum(tokens)
    if total < 1:
        raise ValueError(
            "expected at least one token to score, got none, because every text has only one token"
        )
    ratio = math.fsum(sums) / total
    if count < 2:
        return Interval(ratio, -math.inf, math.inf)
    residual = math.fsum((s - ratio * t) ** 2 for s, t in zip(sums, tokens, strict=True))
    half = Z_95 * math.sqrt(count / (count - 1) * residual) / total
    return Interval(ratio, ratio - half, ratio + half)


def perplexity(logprobs: Sequence[float], tokens: Sequence[int]) -> Interval:
    """exp of the mean of -ln p over tokens, and of the ends of its interval.

    `logprobs[i]` is the sum of ln p of item i's `tokens[i]` tokens. Errors: ValueError without tokens.
    """
    surprise = mean_per_token([-value for value in logprobs], tokens)
    return Interval(*(_exp(value) for value in (surprise.value, surprise.low, surprise.high)))


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf
