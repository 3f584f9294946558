"""The `compression` block of a registration: what it takes, what it refuses, and what becomes of it."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from controlplane.management import requested
from controlplane.management.schemas import compression
from controlplane.management.schemas.compression import CompressionForm
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.state.deltas import Recipe
from workers.compression import choose


def test_methods_and_what_they_take_are_those_of_the_compressor() -> None:
    """The form has names of its own, for a client imports no compressor."""
    assert set(get_args(compression.Method)) == {name.value for name in choose.MethodName}
    assert {name: set(takes) for name, takes in compression.TAKES.items()} == {
        name.value: set(takes) for name, takes in choose.TAKES.items()
    }


def test_techniques_for_estimates_only_are_those_that_no_engine_serves() -> None:
    kinds = {
        name.value: choose.method_of(choose.Options(name)).kind
        for name in choose.MethodName
        if name is not choose.MethodName.auto
    }
    assert {name for name, kind in kinds.items() if kind is None} == compression.JUDGED_ONLY


@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        ({}, Recipe("deltacompress")),
        ({"method": "deltacompress", "bits": 2, "groupSize": 128}, Recipe("deltacompress", 2, None, 128)),
        (
            {"method": "deltamix", "ratio": 0.0625, "maxWidths": 3},
            Recipe("deltamix", ratio=0.0625, max_widths=3),
        ),
        (
            {"evaluation": "/t.json", "maxLoss": 1, "calibration": "/c.jsonl", "rows": 4, "tokens": 16},
            Recipe("auto", calibration="/c.jsonl", rows=4, tokens=16, evaluation="/t.json", max_loss=1.0),
        ),
        (
            {"method": "magnitude", "evaluation": "/t.json", "lossless": True, "device": "cpu"},
            Recipe("magnitude", evaluation="/t.json", lossless=True, device="cpu"),
        ),
    ],
)
def test_a_form_becomes_a_recipe(form: dict[str, Any], recipe: Recipe) -> None:
    delta = requested.delta(CompressionForm.model_validate(form))
    assert delta is not None
    assert delta.recipe == recipe


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"method": "bitdelta"}, "plain checkpoint"),
        ({"method": "sparse-gpt"}, "plain checkpoint"),
        ({"method": "gzip"}, "Input should be"),
        ({"method": "deltamix", "bits": 4}, "has no bits"),
        ({"method": "deltacompress", "ratio": 0.5}, "has no ratio; leave ratio out, or choose"),
        ({"method": "low-rank", "groupSize": 64}, "has no groupSize"),
        ({"method": "auto"}, "needs `evaluation`"),
        ({"method": "auto", "evaluation": "/t"}, "maxLoss"),
        ({"maxLoss": 1}, "needs `evaluation`"),
        ({"method": "magnitude", "evaluation": "/t", "maxLoss": 1}, "only the method 'auto' takes maxLoss"),
        ({"method": "magnitude", "bits": 3}, "Input should be 2 or 4"),
        ({"method": "deltamix", "ratio": 0}, "greater than 0"),
        ({"method": "deltamix", "ratio": 1.5}, "less than or equal to 1"),
        ({"method": "magnitude", "groupSize": 12}, "multiple of 8"),
        ({"method": "magnitude", "colour": "red"}, "Extra inputs"),
    ],
)
def test_invalid_forms_are_refused(form: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CompressionForm.model_validate(form)


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "/m", "compression": {}},
        {"base": "b", "compression": {}},
        {"base": "b", "adapter": "/a", "compression": {}},
        {"source": "/m", "base": "b"},
        {"source": "/m", "base": "b", "adapter": "/a", "compression": {}},
        {"source": "/m", "base": "v", "compression": {}},
        {"compression": {}},
    ],
)
def test_meaningless_registrations_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"give either|its own base"):
        RegisterModelRequest.model_validate({"model": "v", **fields})
