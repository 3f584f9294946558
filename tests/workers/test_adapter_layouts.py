"""Adapters as trainers lay them out: served as PEFT merges them, or refused by what they are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.lora import HARMLESS, READ
from profiler.variants.lora import REFUSED as REFUSED_OPTIONS
from profiler.variants.reading import read_manifest
from profiler.variants.types import VariantLimits
from profiler.variants.verifying import verify_data
from testkit.adapter_layouts import REFUSED, SERVED, SIZES
from testkit.base_layouts import assert_says_what_to_do
from testkit.tiny_families import Tiny
from workers.deltas.merge import merge

LIMITS = VariantLimits(64)
IDS = torch.tensor([[5, 17, 33, 60, 8, 9, 10, 44, 3, 7, 51, 12, 13]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    return Tiny("Llama", SIZES).write(tmp_path_factory.mktemp("base") / "base")


def log_probabilities(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model(IDS).logits.double(), -1)


@pytest.mark.parametrize("name", SERVED)
def test_an_adapter_means_what_it_means_to_peft(name: str, base: Path, tmp_path: Path) -> None:
    """Both merged: ours by the manifest that engines load, with its tensors and its scalings."""
    folder = SERVED[name](tmp_path / "adapter")
    verify_data(read_manifest(folder, read_model(base), LIMITS))
    merge(base, folder, tmp_path / "merged")
    ours = log_probabilities(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = log_probabilities(plain)
    theirs = log_probabilities(PeftModel.from_pretrained(plain, folder).merge_and_unload())
    assert (ours - theirs).abs().max() < 1e-3
    assert (without - theirs).abs().max() > 0.05, "the adapter changes nothing: the test would show nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_unserved_layouts_are_refused_by_their_kind(name: str, base: Path, tmp_path: Path) -> None:
    build, words = REFUSED[name]
    folder = build(tmp_path / "adapter")
    with pytest.raises((AdapterError, CheckpointError), match=re.compile(words, re.DOTALL)) as refused:
        read_manifest(folder, read_model(base), LIMITS)
    assert_says_what_to_do(str(refused.value), folder)


def test_every_option_of_peft_is_read_refused_or_known_to_be_harmless() -> None:
    """A key that a later PEFT adds must be looked at: it may change what the weights mean."""
    known = {*READ, *REFUSED_OPTIONS, *HARMLESS}
    assert {field.name for field in dataclasses.fields(LoraConfig)} - known == set()
