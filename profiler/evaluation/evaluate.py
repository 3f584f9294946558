"""Running a task on a model and computing the task's figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiler.evaluation.results import (
    METRIC_OF,
    Interval,
    Metric,
    Result,
    mean_per_token,
    perplexity,
    proportion,
)
from profiler.evaluation.scoring import chosen, divergence, is_right
from profiler.evaluation.tasks import Task
from profiler.evaluation.types import (
    Answerer,
    Distribution,
    Form,
    Item,
    Multiple,
    Pair,
    Question,
    Scored,
    Text,
)


def evaluate(task: Task, answerer: Answerer) -> Result:
    """Compute the task's own figure: the share of right answers, or the perplexity.

    Errors: the answerer's errors; ValueError for texts of which no token can be scored.
    """
    texts = [item for item in task.items if isinstance(item, Text)]
    if texts:
        scores = answerer.score([Pair("", item.text) for item in texts])
        tokens = [score.tokens for score in scores]
        found = perplexity([score.logprob for score in scores], tokens)
        return _result(task, METRIC_OF[task.kind], found, sum(tokens))
    right = rights(task, answerer)
    return _result(task, METRIC_OF[task.kind], proportion(sum(right), len(right)))


def rights(task: Task, answerer: Answerer) -> list[bool]:
    """Whether each item of an exact match or a multiple choice is answered right, in the task's order.

    Comparing two models item by item shows smaller differences than comparing their shares. Errors:
    ValueError for a task of texts.
    """
    questions = [item for item in task.items if isinstance(item, Question)]
    choices = [item for item in task.items if isinstance(item, Multiple)]
    if len(questions) + len(choices) < len(task.items):
        raise ValueError(
            f"the items of '{task.name}' are texts, which have no right answer; use tasks with answers"
        )
    answers = answerer.generate([q.prompt for q in questions], task.settings) if questions else []
    right = [is_right(q, a, task.settings) for q, a in zip(questions, answers, strict=True)]
    return [*right, *_chosen_right(choices, answerer, task)]


def _chosen_right(items: Sequence[Multiple], answerer: Answerer, task: Task) -> list[bool]:
    if not items:
        return []
    form = task.settings.format
    scores = answerer.score([Pair(item.prompt, choice, form) for item in items for choice in item.choices])
    by_item, at = [], 0
    for item in items:
        by_item.append(_all_scored(item, scores[at : at + len(item.choices)]))
        at += len(item.choices)
    return [
        chosen(item, own, task.settings.likelihood) == item.answer
        for item, own in zip(items, by_item, strict=True)
    ]


def _all_scored(item: Multiple, scores: Sequence[Scored]) -> Sequence[Scored]:
    for choice, score in zip(item.choices, scores, strict=True):
        if score.tokens < 1:
            raise ValueError(
                f"the choice {choice!r:.40} adds no token to its prompt {item.prompt!r:.40}, so it has no "
                "likelihood; put the white space between prompt and choice at the beginning of the choice"
            )
    return scores


def compare(task: Task, answerer: Answerer, reference: Answerer, name: str) -> Result:
    """KL(reference || answerer) in nats per token, at the tokens of the right answers (or of the texts).
    `divergence` says what is exact. `name` is the reference's name.

    Errors: the answerers' errors; ValueError when both tokenize a text differently.
    """
    pairs = [pair_of(item, task.settings.format) for item in task.items]
    mine, theirs = answerer.distributions(pairs), reference.distributions(pairs)
    sums, tokens, covered = [], [], []
    for pair, own, other in zip(pairs, mine, theirs, strict=True):
        found = [divergence(p, q) for p, q in _aligned(pair, other, own, name)]
        sums.append(math.fsum(each.nats for each in found))
        tokens.append(len(found))
        covered.append(math.fsum(each.coverage for each in found))
    return divergence_result(task, name, sums, tokens, math.fsum(covered) / max(sum(tokens), 1))


def divergence_result(
    task: Task, reference: str, sums: Sequence[float], tokens: Sequence[int], coverage: float = 1.0
) -> Result:
    """A KL from each item's sum of nats and its number of tokens. Errors: ValueError without tokens."""
    mean = mean_per_token(sums, tokens)
    at_least_0 = Interval(mean.value, max(mean.low, 0.0), mean.high)
    return _result(task, Metric.KL, at_least_0, sum(tokens), reference, coverage)


def pair_of(item: Item, form: Form) -> Pair:
    """The part of an item on which two models are compared: its prompt and right answer, or its text."""
    match item:
        case Question():
            return Pair(item.prompt, item.answers[0], form)
        case Multiple():
            return Pair(item.prompt, item.choices[item.answer], form)
        case Text():
            return Pair("", item.text)


def _aligned(
    pair: Pair, reference: list[Distribution], other: list[Distribution], name: str
) -> list[tuple[Distribution, Distribution]]:
    if len(reference) != len(other):
        raise ValueError(
            f"'{name}' cuts {pair.continuation!r:.60} into {len(reference)} tokens and the other model into "
            f"{len(other)}: a KL compares models that share a tokenizer"
        )
    return list(zip(reference, other, strict=True))


def _result(
    task: Task, metric: Metric, found: Interval, tokens: int = 0, reference: str = "", coverage: float = 1.0
) -> Result:
    return Result(
        task.name,
        metric,
        found.value,
        found.low,
        found.high,
        len(task.items),
        tokens,
        reference,
        coverage,
        task.digest,
    )
