"""A config that says tied, and files that hold another head: that head counts, as in transformers and vLLM.

PEFT writes such a checkpoint when it merges a trained head into a tied model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from profiler.checkpoint import has_own_head, read_model
from profiler.errors import CheckpointError
from profiler.fingerprints.folder import write_fingerprint
from testkit import random_variants as make
from testkit.random_adapters import RandomLora
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude
from workers.deltas.merge import merge

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.tensor([[(7 * i * i + 3 * i + 5) % 60 + 4 for i in range(40)]])


def give_head(folder: Path, change: float) -> Path:
    """Store a head that differs from the embedding by `change`."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    noise = torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(9))
    save_file({**tensors, HEAD: tensors[EMBEDDING] + change * noise}, file, metadata={"format": "pt"})
    return folder


def logprobs(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(IDS).logits.double(), -1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return give_head(make.write_tiny_base(tmp_path / "base"), 0.5)


def test_the_stored_head_counts(tmp_path: Path, base: Path) -> None:
    copied = give_head(make.write_tiny_base(tmp_path / "copied"), 0.0)
    assert [read_model(folder).tied for folder in (base, copied)] == [False, True]
    assert [has_own_head(folder) for folder in (base, copied)] == [True, False]
    spec = read_model(base)
    assert spec.other_weight_bytes == read_model(copied).other_weight_bytes + 64 * 32 * 4
    assert spec.fingerprint != read_model(make.write_tiny_base(tmp_path / "plain")).fingerprint


def test_one_value_makes_another_head(tmp_path: Path) -> None:
    folder = give_head(make.write_tiny_base(tmp_path / "base"), 0.0)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[HEAD][-1, -1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert not read_model(folder).tied


def test_merging_keeps_the_stored_head(tmp_path: Path, base: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = make.write(base, tmp_path / "lora", RandomLora("a", 4, 1))
    merge(base, adapter, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()
    with torch.inference_mode():
        reference = torch.log_softmax(expected(IDS).logits.double(), -1)
    assert (logprobs(tmp_path / "merged") - reference).abs().max() < 1e-3
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("base_has_own", [True, False])
def test_compressing_keeps_the_stored_head(tmp_path: Path, base: Path, base_has_own: bool) -> None:
    start = base if base_has_own else make.write_tiny_base(tmp_path / "tied")
    tuned = make.write_tuned(start, tmp_path / "tuned", 3, 0.01, tables=0.01)
    give_head(tuned, 0.5)
    compress(Job(start, tuned, tmp_path / "delta", magnitude(), force=True))
    merge(start, tmp_path / "delta", tmp_path / "merged")
    assert not read_model(tmp_path / "merged").tied
    merged, whole = (load_file(f / "model.safetensors")[HEAD] for f in (tmp_path / "merged", tuned))
    assert (merged - whole).abs().max() < 0.02  # half of one in 127 to a row's largest change
    assert (logprobs(tmp_path / "merged") - logprobs(tuned)).abs().mean() < 0.1
    assert (logprobs(start) - logprobs(tuned)).abs().mean() > 0.5


def test_a_fingerprint_is_measured_with_that_head(tmp_path: Path, base: Path) -> None:
    write_fingerprint(base, tmp_path / "one", 1)
    assert json.loads((tmp_path / "one/config.json").read_text())["tie_word_embeddings"] is False
    write_fingerprint(make.write_tiny_base(tmp_path / "plain"), tmp_path / "two", 1)
    assert json.loads((tmp_path / "two/config.json").read_text())["tie_word_embeddings"] is True


def test_a_head_that_no_engine_loads_is_refused(tmp_path: Path, base: Path) -> None:
    from profiler.architectures.registry import describe
    from profiler.checkpoint import as_stored
    from profiler.weight_files import locate

    llama = describe(json.loads((base / "config.json").read_text()), base / "config.json")
    gemma = replace(llama, architecture="GemmaForCausalLM")
    with pytest.raises(CheckpointError, match=r"which differs from model.embed_tokens.weight"):
        as_stored(gemma, locate(base), base)
