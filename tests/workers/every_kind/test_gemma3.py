"""Variants of every kind on a Gemma 3 and the base in one batch: windows in some layers, norms stored as
their distance from one, a scaled embedding. Each answers as transformers does with its merged weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.gemma3_models import LAYERS, VOCABULARY, WINDOW, write_gemma3
from testkit.workers.variant_lab import (
    BASE,
    KINDS,
    LOGPROB_TOLERANCE,
    MODELS,
    Lab,
    engine_config,
    running,
    with_variants,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [[3 + (i * i + n) % (VOCABULARY - 3) for i in range(n)] for n in (WINDOW - 3, 4 * WINDOW + 1)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("gemma3")
    checkpoints = with_variants(write_gemma3(folder / BASE), folder)
    with running(checkpoints, engine_config(checkpoints.base, 1, (LAYERS,))) as lab:
        yield lab


def test_one_batch_equals_merged_weights(lab: Lab) -> None:
    rows = [(model, prompt) for prompt in PROMPTS for model in MODELS]
    for name in KINDS:
        lab.run(lab.worker.load_variant(lab.checkpoints.variants[name]))
    answers = lab.run(lab.ask_all(rows, True))
    lab.check(rows, [answers])
    for model in KINDS:
        mine = [answer for answer, (asked, _) in zip(answers, rows, strict=True) if asked == model]
        assert lab.checkpoints.differences(BASE, mine)[1] > 20 * LOGPROB_TOLERANCE, "hardly a variant"
