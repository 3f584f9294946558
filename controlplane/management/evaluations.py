"""What becomes of the figures that are kept with a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from controlplane.management.schemas.evaluations import EvaluationForm
from controlplane.state.records import Evaluation, Model

MOST = 256  # figures of one model; the oldest go


def with_evaluations(model: Model, found: Sequence[EvaluationForm], now_s: float) -> Model:
    """The model with these figures, each in the place of an older one of the same task, metric and reference.
    Of several of the same the last holds."""
    kept = {each.subject: each for each in model.evaluations}
    for form in found:
        new = Evaluation(**form.model_dump(), measured_at_s=now_s)
        kept.pop(new.subject, None)
        kept[new.subject] = new
    return dataclasses.replace(model, evaluations=tuple(kept.values())[-MOST:])
