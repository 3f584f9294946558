"""The code that trains and judges fine-tunes, against transformers and the product's own readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.compression import lora, models
from benchmarks.compression.tasks import task_named
from workers.deltas.merge import merge

pytestmark = pytest.mark.slow
EXAMPLES = task_named("cipher").train(0, 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_tiny(tmp_path_factory.mktemp("tiny") / "base")


def test_answers_are_seen_as_if_alone(base: Path) -> None:
    """Logits of a padded batch are those of transformers for each text by itself."""
    model, tokenizer = models.load(base, "cpu")
    model.float()
    tokens = models.tokenized(tokenizer, EXAMPLES)
    batch = models.right_padded(tokens, "cpu")
    found = models.answer_logits(model, batch)
    expected = []
    for each in tokens:
        logits = model(input_ids=torch.tensor([each.prompt + each.answer])).logits[0]
        expected.append(logits[len(each.prompt) - 1 : -1])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-4)
    assert batch.answers.tolist() == [token for each in tokens for token in each.answer]


def test_a_model_diverges_from_others_only(base: Path) -> None:
    model, tokenizer = models.load(base, "cpu")
    other, _ = models.load(base, "cpu")
    tokens = models.tokenized(tokenizer, EXAMPLES)
    assert models.divergence(model, other, tokens) == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        other.model.norm.weight.mul_(3)
    p, q = (
        models.answer_logits(m, models.right_padded(tokens, "cpu")).float().softmax(1) for m in (model, other)
    )
    expected = torch.nn.functional.kl_div(q.log(), p, reduction="batchmean")
    assert models.divergence(model, other, tokens) == pytest.approx(float(expected), rel=1e-3)


def test_an_adapter_is_read_and_merged_as_it_was_trained(base: Path, tmp_path: Path) -> None:
    model, tokenizer = models.load(base, "cpu")
    lora.adapt(model, rank=4)
    for _, module in lora.adapters(model):
        torch.nn.init.normal_(module.b, std=0.05)
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"a", "b"}
    lora.save(model, base, tmp_path / "adapter")
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged, _ = models.load(tmp_path / "merged", "cpu")
    batch = models.right_padded(models.tokenized(tokenizer, EXAMPLES), "cpu")
    with torch.inference_mode():
        found, expected = (models.answer_logits(m.float(), batch) for m in (merged, model))
    before = models.answer_logits(models.load(base, "cpu")[0].float(), batch)
    assert (found - expected).norm() < 0.02 * (expected - before).norm()


def test_a_saved_model_has_the_base_s_names(base: Path, tmp_path: Path) -> None:
    model, _ = models.load(base, "cpu")
    with torch.no_grad():
        model.model.norm.weight.fill_(0.5)
    models.save(model, base, tmp_path / "tuned")
    again, _ = models.load(tmp_path / "tuned", "cpu")
    assert bool((again.model.norm.weight == 0.5).all())
    assert again.lm_head.weight is again.model.embed_tokens.weight
