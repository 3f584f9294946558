"""What a compressing process says, a line of JSON each: how far it is, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter


@dataclass(frozen=True)
class TaskLoss:
    """One task, before (the uncompressed fine-tune) and after. `loss` and its 95 % interval are in points of
    100 for a share of right answers, in percent for a perplexity; None: an end that is not finite."""

    task: str
    metric: str
    before: float
    after: float
    loss: float
    low: float | None = None
    high: float | None = None
    items: int = 0


@dataclass(frozen=True)
class Quality:
    """What an artefact was measured to lose, beside the uncompressed fine-tune, on the same tasks."""

    losses: tuple[TaskLoss, ...]

    @property
    def accuracy(self) -> float:
        """What is left of the task that lost most, in percent of the fine-tune's; 0..100."""
        return min((_kept(each) for each in self.losses), default=100.0)


def _kept(task: TaskLoss) -> float:
    """Of a perplexity, which is better when it is less, its inverse counts."""
    before, after = task.before, task.after
    if task.metric == "perplexity":
        before, after = 1 / before, 1 / after
    return 100.0 if after >= before else 100 * after / before


def quality_of(losses: Sequence[Mapping[str, Any]] | None) -> Quality | None:
    """Of the entries of delta.json (docs/formats.md, quality); None where there are none.

    Errors: KeyError, TypeError or ValueError for what is no such list.
    """
    return Quality(tuple(map(_loss, losses))) if losses else None


def _loss(entry: Mapping[str, Any]) -> TaskLoss:
    found = {
        **{name: entry[name] for name in ("task", "metric", "low", "high", "items")},
        **{name: _finite(entry[name]) for name in ("before", "after")},
        "loss": _finite(entry["value"]),
    }
    loss = _loss_adapter().validate_python(found)
    least = 1.0 if loss.metric == "perplexity" else 0.0
    if not all(least <= each <= sys.float_info.max for each in (loss.before, loss.after)):
        raise ValueError(f"expected a {loss.metric} from {least:g} on, got {loss.before} and {loss.after}")
    return loss


def _finite(value: float | None) -> float:
    """A perplexity beyond all numbers is None there."""
    return sys.float_info.max if value is None else value


@cache
def _loss_adapter() -> TypeAdapter[TaskLoss]:
    return TypeAdapter(TaskLoss)


@dataclass(frozen=True)
class Artifact:
    """A delta on disk. `size_bytes` of `tuned_bytes` are left; `layer_errors` are mean relative errors of
    layers' outputs (equation 1 of DeltaMix) by kind of module. `quality` is None where none was asked for."""

    method: str
    kind: str
    size_bytes: int
    tuned_bytes: int
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    quality: Quality | None = None

    @property
    def ratio(self) -> float:
        """How many times smaller than the fine-tune it is."""
        return self.tuned_bytes / max(1, self.size_bytes)


@dataclass(frozen=True)
class Progress:
    """`share` (0..1) is done; `left_s` seconds are left, as far as can be said."""

    share: float
    doing: str
    left_s: float | None = None
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True)
class Done:
    artifact: Artifact
    kind: Literal["done"] = "done"


@dataclass(frozen=True)
class Failed:
    """It would fail again: the message says what was expected, what came and what to do."""

    message: str
    kind: Literal["failed"] = "failed"


Line = Progress | Done | Failed


@cache
def _adapter() -> TypeAdapter[Line]:
    return TypeAdapter(Annotated[Line, Field(discriminator="kind")])


def to_line(line: Line) -> str:
    return _adapter().dump_json(line).decode()


def from_line(text: str) -> Line:
    """Errors: ValueError for what is no such line."""
    return _adapter().validate_json(text)


def left_s(began_share: float, share: float, elapsed_s: float) -> float | None:
    """Seconds left at the pace since it began at `began_share`. None before there is a pace."""
    done = share - began_share
    return None if done <= 0 else elapsed_s * max(0.0, 1 - share) / done
