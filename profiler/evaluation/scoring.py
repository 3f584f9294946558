"""Whether a model's answer is right, and how far the distributions of two models are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from profiler.evaluation.normalising import normalised
from profiler.evaluation.types import Distribution, Likelihood, Multiple, Question, Scored, Settings

ROUNDING = 1e-5  # the possible error of a sum of float32 probabilities


def is_right(question: Question, answer: str, settings: Settings) -> bool:
    """Whether the answer equals one of the right answers, after normalising both."""
    given = normalised(answer, settings.normalise)
    return any(given == normalised(right, settings.normalise) for right in question.answers)


def first_scored(whole: Sequence[int], context: Sequence[int]) -> int:
    """The index of the first scored token of a text. It follows the longest prefix that the text's tokens
    share with its context's, but it is never the first token, which nothing predicts."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(whole, context, strict=False))
    return max(sum(1 for _ in alike), 1)


def chosen(item: Multiple, scores: Sequence[Scored], likelihood: Likelihood) -> int:
    """The index of the most likely choice, the first among equals. `scores[i]` belongs to `choices[i]`.

    A longer choice has more tokens and so a lower probability. `per_byte` corrects this: it divides by the
    bytes in UTF-8, not by tokens, so that models with different tokenizers choose by the same rule.
    """
    values = [score.logprob for score in scores]
    if likelihood is Likelihood.PER_BYTE:
        values = [v / len(c.encode()) for v, c in zip(values, item.choices, strict=True)]
    return max(range(len(values)), key=values.__getitem__)


@dataclass(frozen=True)
class Divergence:
    """`nats` at one position, and the `coverage`: the share of the reference's mass that is known by
    token."""

    nats: float
    coverage: float


def divergence(reference: Distribution, other: Distribution) -> Divergence:
    """KL(reference || other) at one position, from some tokens of each: a lower bound.

    Tokens that both distributions list are separate events; all other tokens are one event. Merging events
    never raises a KL (the log sum inequality; Cover and Thomas, Elements of Information Theory, theorem
    2.7.1). So the result is the KL itself if all tokens are listed, and otherwise at most the KL.
    """
    shared = reference.logprobs.keys() & other.logprobs.keys()
    pairs = [(reference.logprobs[token], other.logprobs[token]) for token in shared]
    told = math.fsum(math.exp(p) * (p - q) for p, q in pairs if p > -math.inf)
    mass_p = math.fsum(math.exp(p) for p, _ in pairs)
    rest_p, rest_q = 1 - mass_p, 1 - math.fsum(math.exp(q) for _, q in pairs)
    if rest_p > 0:
        # If the other model's rest is only rounding error, its logarithm would be noise.
        told += rest_p * math.log(rest_p / max(rest_q, ROUNDING))
    return Divergence(max(told, 0.0), min(mass_p, 1.0))
