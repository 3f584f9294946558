"""From what a model answers to whether it is right, and how far two models' expectations are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from profiler.evaluation.normalising import normalised
from profiler.evaluation.types import Distribution, Likelihood, Multiple, Question, Scored, Settings

ROUNDING = 1e-5  # what a sum of float32 probabilities may be off


def is_right(question: Question, answer: str, settings: Settings) -> bool:
    """Whether it is one of the right answers once both are normalised."""
    given = normalised(answer, settings.normalise)
    return any(given == normalised(right, settings.normalise) for right in question.answers)


def first_scored(whole: Sequence[int], context: Sequence[int]) -> int:
    """Where the scored part of a text's tokens begins: after the longest prefix that it shares with those of
    its context, but never at a first token, which nothing predicts."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(whole, context, strict=False))
    return max(sum(1 for _ in alike), 1)


def chosen(item: Multiple, scores: Sequence[Scored], likelihood: Likelihood) -> int:
    """The index of the most likely choice, the first of several. `scores[i]` is that of `choices[i]`.

    A longer choice has more tokens to be unlikely in; `per_byte` divides that out, by the bytes of its
    UTF-8 and not by tokens, so that models with other tokenizers choose by the same.
    """
    values = [score.logprob for score in scores]
    if likelihood is Likelihood.PER_BYTE:
        values = [v / len(c.encode()) for v, c in zip(values, item.choices, strict=True)]
    return max(range(len(values)), key=values.__getitem__)


@dataclass(frozen=True)
class Divergence:
    """`nats` of one position, and the `coverage` of the reference's mass that was told token by token."""

    nats: float
    coverage: float


def divergence(reference: Distribution, other: Distribution) -> Divergence:
    """KL(reference || other) at one position, from some tokens of each: a lower bound.

    Tokens that both list are told apart, all others are one event. Merging events never raises a KL (the log
    sum inequality; Cover and Thomas, Elements of Information Theory, theorem 2.7.1), so what this gives is
    the KL itself where all are listed, and else at most it.
    """
    shared = reference.logprobs.keys() & other.logprobs.keys()
    pairs = [(reference.logprobs[token], other.logprobs[token]) for token in shared]
    told = math.fsum(math.exp(p) * (p - q) for p, q in pairs if p > -math.inf)
    mass_p = math.fsum(math.exp(p) for p, _ in pairs)
    rest_p, rest_q = 1 - mass_p, 1 - math.fsum(math.exp(q) for _, q in pairs)
    if rest_p > 0:
        # Of a rest that rounding alone would leave to the other model, the KL's size would be noise.
        told += rest_p * math.log(rest_p / max(rest_q, ROUNDING))
    return Divergence(max(told, 0.0), min(mass_p, 1.0))
