"""Updates of the evaluations that a model keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from controlplane.management.schemas.evaluations import EvaluationForm
from controlplane.state.records import Evaluation, Model

MOST = 256  # evaluations of one model; the oldest are dropped


def with_evaluations(model: Model, found: Sequence[EvaluationForm], now_s: float) -> Model:
    """The model with these evaluations. Each replaces an older one of the same task, metric and reference;
    the last of several such evaluations holds."""
    kept = {each.subject: each for each in model.evaluations}
    for form in found:
        new = Evaluation(**form.model_dump(), measured_at_s=now_s)
        kept.pop(new.subject, None)
        kept[new.subject] = new
    return dataclasses.replace(model, evaluations=tuple(kept.values())[-MOST:])
