"""The output of a compressing process, lines of JSON: its progress, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter


@dataclass(frozen=True)
class TaskLoss:
    """The result of one task, before (the uncompressed fine-tune) and after.

    `loss` and its 95 % interval are in points of 100 for a share of right answers, in percent for a
    perplexity; None: an end that is not finite.
    """

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
    """The measured loss of an artefact against the uncompressed fine-tune, on the same tasks."""

    losses: tuple[TaskLoss, ...]

    @property
    def accuracy(self) -> float:
        """The accuracy left on the task that lost most, in percent of the fine-tune's; 0..100."""
        return min((_kept(each) for each in self.losses), default=100.0)


def _kept(task: TaskLoss) -> float:
    """The share that is left of a task's figure. A perplexity is better when it is lower, so its inverse
    counts.
    """
    before, after = task.before, task.after
    if task.metric == "perplexity":
        before, after = 1 / before, 1 / after
    return 100.0 if after >= before else 100 * after / before


def quality_of(losses: Sequence[Mapping[str, Any]] | None) -> Quality | None:
    """The quality from the entries of delta.json (docs/formats.md, quality); None if there are none.

    Errors: KeyError, TypeError or ValueError if the value is no such list.
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
    """The value; delta.json has None for a perplexity too large for a number."""
    return sys.float_info.max if value is None else value


@cache
def _loss_adapter() -> TypeAdapter[TaskLoss]:
    return TypeAdapter(TaskLoss)


@dataclass(frozen=True)
class Artifact:
    """A delta on disk.

    It has `size_bytes` of the fine-tune's `tuned_bytes`. `layer_errors` are mean relative errors of layers'
    outputs (equation 1 of DeltaMix) by kind of module. `quality` is None if none was requested.
    """

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
        """How many times smaller it is than the fine-tune."""
        return self.tuned_bytes / max(1, self.size_bytes)


@dataclass(frozen=True)
class Progress:
    """`share` (0..1) is done; `left_s` is the estimated number of seconds left."""

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
    """The compression would fail again: the message has the expectation, the cause and the remedy."""

    message: str
    kind: Literal["failed"] = "failed"


Line = Progress | Done | Failed


@cache
def _adapter() -> TypeAdapter[Line]:
    return TypeAdapter(Annotated[Line, Field(discriminator="kind")])


def to_line(line: Line) -> str:
    return _adapter().dump_json(line).decode()


def from_line(text: str) -> Line:
    """Parse a line. Errors: ValueError if it is no such line."""
    return _adapter().validate_json(text)


def left_s(began_share: float, share: float, elapsed_s: float) -> float | None:
    """The seconds left at the pace since the share was `began_share`. None before there is a pace."""
    done = share - began_share
    return None if done <= 0 else elapsed_s * max(0.0, 1 - share) / done
