"""Variants of every kind and the base in one batch, on every way to split the model: what each answers
equals what transformers answers with its merged (dequantised) weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from variant_lab import (
    KINDS,
    LAYERS,
    MODELS,
    PROMPTS,
    Checkpoints,
    Lab,
    engine_config,
    running,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLANS = {
    "one process": (1, (LAYERS,)),
    "two stages": (1, (1, LAYERS - 1)),
    "three-way tensors": (3, (LAYERS,)),
}


@pytest.fixture(scope="module", params=PLANS)
def lab(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Lab]:
    with running(checkpoints, engine_config(checkpoints.base, *PLANS[request.param])) as lab:
        yield lab


def test_one_batch_equals_merged_weights(lab: Lab) -> None:
    rows = [(model, prompt) for prompt in PROMPTS for model in MODELS]
    for name in KINDS:
        lab.run(lab.worker.load_variant(lab.checkpoints.variants[name]))
    # Twice without salts: the second time every prompt's blocks are in the prefix cache, and a variant
    # that read another's would answer like it.
    passes = [lab.run(lab.ask_all(rows, salted)) for salted in (True, False, False)]
    lab.check(rows, passes)
    texts = {tuple(answer.tokens) for answer in passes[0][: len(MODELS)]}
    assert len(texts) > len(MODELS) // 2, "the variants hardly differ: the test would show nothing"
