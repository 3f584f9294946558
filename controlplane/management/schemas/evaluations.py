"""What was measured of a model's quality, as it is sent to be kept and shown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from controlplane.management.schemas.common import Strict, View

if TYPE_CHECKING:
    from controlplane.state.records import Evaluation
    from profiler.evaluation.results import Result

MetricName = Literal["exact_match", "multiple_choice", "perplexity", "kl"]
TaskName = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Figure = Annotated[float, Field(allow_inf_nan=False)]
SHARES = {"exact_match", "multiple_choice"}


class EvaluationForm(Strict):
    """One figure of one task. `low` to `high` is its 95 % interval; without one of them it is unbounded."""

    task: TaskName
    metric: MetricName = Field(
        description="exact_match and multiple_choice: the share of right answers, 0 to 1; kl: nats per token."
    )
    value: Annotated[Figure, Field(ge=0)]
    low: Figure | None = None
    high: Figure | None = None
    items: Annotated[int, Field(ge=1, le=10**9)]
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    reference: Annotated[str, StringConstraints(max_length=192)] = Field(
        default="", description="For kl: the reference model."
    )
    coverage: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=1.0,
        description="For kl: the share of the reference's probability that was known token by token.",
    )
    digest: Annotated[str, StringConstraints(max_length=64)] = Field(
        default="", description="A digest of the task's content."
    )

    @model_validator(mode="after")
    def _sensible(self) -> EvaluationForm:
        if self.metric in SHARES and self.value > 1:
            raise ValueError(f"{self.metric} is a share: expected 0 to 1, got {self.value}")
        if (self.metric == "kl") != bool(self.reference):
            raise ValueError(
                f"expected a reference for kl and for no other metric, got metric {self.metric} and "
                f"reference {self.reference!r}"
            )
        return self

    @classmethod
    def of(cls, found: Result) -> EvaluationForm:
        return cls(
            task=found.task,
            metric=found.metric.value,
            value=found.value,
            low=_bounded(found.low),
            high=_bounded(found.high),
            items=found.items,
            tokens=found.tokens,
            reference=found.reference,
            coverage=found.coverage,
            digest=found.digest,
        )


class EvaluationsRequest(Strict):
    evaluations: Annotated[list[EvaluationForm], Field(min_length=1, max_length=256)]


class EvaluationView(View):
    """A figure that is kept. `metric` is exact_match or multiple_choice (0 to 1), perplexity, or kl (nats a
    token, from `reference`, of whose probability `coverage` was told token by token)."""

    task: str
    metric: str
    value: float
    low: float | None
    high: float | None
    items: int
    tokens: int
    reference: str
    coverage: float
    digest: str
    measuredAt: float

    @classmethod
    def of(cls, kept: Evaluation) -> EvaluationView:
        return cls(
            task=kept.task,
            metric=kept.metric,
            value=kept.value,
            low=kept.low,
            high=kept.high,
            items=kept.items,
            tokens=kept.tokens,
            reference=kept.reference,
            coverage=kept.coverage,
            digest=kept.digest,
            measuredAt=kept.measured_at_s,
        )


class EvaluationsView(View):
    evaluations: list[EvaluationView]


def _bounded(end: float) -> float | None:
    return end if math.isfinite(end) else None
