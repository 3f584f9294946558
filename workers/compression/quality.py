"""The loss of quality of a compression: the fine-tune and its artefact answer the same tasks.

A loss is counted in percent. For a task with right and wrong answers it is the share of right answers before
minus the share after, in points of 100. For a perplexity it is its increase. Both models answer the same
items, so the interval is that of the items' differences, which is narrower than the models' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profiler.evaluation.evaluate import rights
from profiler.evaluation.results import METRIC_OF, Z_95, Metric, mean_per_token, perplexity, proportion
from profiler.evaluation.tasks import Task
from profiler.evaluation.types import Answerer, Pair, Text
from profiler.files import read_json
from profiler.variants.delta import DELTA
from workers.compression.durable import write_json

QUALITY = "quality"  # the entry of delta.json


@dataclass(frozen=True)
class Outcome:
    """A model's outcome of one task, item by item, in the task's order.

    `values` are 1 for right and 0 for wrong, or a text's ln p. `tokens` are the numbers of scored tokens
    (empty for questions). `digest` is the task's.
    """

    task: str
    metric: Metric
    digest: str
    values: tuple[float, ...]
    tokens: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def figure(self) -> float:
        """The share of items that are right, or the perplexity."""
        if self.metric.higher_is_better:
            return proportion(round(sum(self.values)), len(self.values)).value
        return perplexity(self.values, self.tokens).value


@dataclass(frozen=True)
class Loss:
    """How much worse a task went, in percent, and the 95 % interval over items drawn like these."""

    task: str
    metric: Metric
    before: float
    after: float
    value: float
    low: float
    high: float
    items: int
    digest: str = ""

    @property
    def unit(self) -> str:
        return "points" if self.metric.higher_is_better else "%"

    def __str__(self) -> str:
        return f"{self.task}: {self.value:.2f} {self.unit} ({self.low:.2f} to {self.high:.2f})"


def outcome(raw: Mapping[str, Any]) -> Outcome:
    """The inverse of `Outcome.as_json`. Raises KeyError, TypeError or ValueError for anything else."""
    lists = {"values": tuple(raw["values"]), "tokens": tuple(raw["tokens"])}
    return Outcome(**{**raw, **lists, "metric": Metric(raw["metric"])})


def outcomes_of(tasks: Iterable[Task], answerer: Answerer) -> tuple[Outcome, ...]:
    """The outcomes of a model for each task. Errors: those of the answerer."""
    return tuple(_outcome(task, answerer) for task in tasks)


def losses_between(before: Sequence[Outcome], after: Sequence[Outcome]) -> tuple[Loss, ...]:
    """The losses, task by task. Raises ValueError if the outcomes are not of the same tasks."""
    if [each.digest for each in before] != [each.digest for each in after]:
        raise ValueError("expected the outcomes of the same tasks in the same order, got others")
    return tuple(loss_between(a, b) for a, b in zip(before, after, strict=True))


def loss_between(before: Outcome, after: Outcome) -> Loss:
    """The loss of one task. Raises ValueError if the two scored different tokens: they do not share a
    tokenizer.
    """
    if before.tokens != after.tokens or len(before.values) != len(after.values):
        raise ValueError(f"{before.task}: the two models scored other items or tokens; expected the same")
    difference = _share_lost if before.metric.higher_is_better else _perplexity_gained
    value, low, high = difference(before, after)
    return Loss(
        before.task,
        before.metric,
        before.figure,
        after.figure,
        value,
        low,
        high,
        len(before.values),
        before.digest,
    )


def worst(losses: Iterable[Loss]) -> Loss:
    """The task that lost most; a limit on the loss applies to it."""
    return max(losses, key=lambda loss: loss.value)


def described(losses: Iterable[Loss]) -> list[dict[str, Any]]:
    """The losses for delta.json and for results as JSON. An end of an interval that is not finite is null."""
    return [
        {key: _finite(value) for key, value in {**asdict(loss), "unit": loss.unit}.items()} for loss in losses
    ]


def write_quality(folder: Path, losses: Iterable[Loss]) -> None:
    """Put the losses into the delta's delta.json. Raises OSError."""
    write_json(folder / DELTA, {**read_json(folder / DELTA), QUALITY: described(losses)}, indent=1)


def _outcome(task: Task, answerer: Answerer) -> Outcome:
    metric = METRIC_OF[task.kind]
    texts = [item.text for item in task.items if isinstance(item, Text)]
    if not texts:
        right = tuple(float(each) for each in rights(task, answerer))
        return Outcome(task.name, metric, task.digest, right)
    scores = answerer.score([Pair("", text) for text in texts])
    values, tokens = tuple(score.logprob for score in scores), tuple(score.tokens for score in scores)
    return Outcome(task.name, metric, task.digest, values, tokens)


def _share_lost(before: Outcome, after: Outcome) -> tuple[float, float, float]:
    """The loss in points, and the interval of Agresti and Min (2005) for matched proportions.

    It is Wald's interval, with half an item added to each of the four cells. So it has a width even if the
    two models agree on every item.
    """
    pairs = list(zip(before.values, after.values, strict=True))
    lost, won, count = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0)), len(pairs)
    centre = (lost - won) / (count + 2)
    half = Z_95 * math.sqrt(lost + won + 1 - (lost - won) ** 2 / (count + 2)) / (count + 2)
    low, high = max(-1.0, centre - half), min(1.0, centre + half)
    return 100 * (lost - won) / count, 100 * low, 100 * high


def _perplexity_gained(before: Outcome, after: Outcome) -> tuple[float, float, float]:
    """The loss in percent: e to the mean of the tokens' additional surprise, less 1."""
    sums = [a - b for a, b in zip(before.values, after.values, strict=True)]
    mean = mean_per_token(sums, before.tokens)
    value, low, high = (100 * _expm1(each) for each in (mean.value, mean.low, mean.high))
    return value, low, high


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 709 else math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
