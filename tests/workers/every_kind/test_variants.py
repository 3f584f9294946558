"""Variants of every kind and the base in one batch, on every way to split the model: what each answers
equals what transformers answers with its merged (dequantised) weights."""

from __future__ import annotations

import pytest

from testkit.workers.variant_lab import KINDS, MODELS, PROMPTS, Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("lab", ["one process", "two stages", "three-way tensors"], indirect=True)
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
