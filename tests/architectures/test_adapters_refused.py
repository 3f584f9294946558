"""Variants of bases whose architecture has no adapters here are refused, whatever they hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.checkpoint import read_model
from profiler.errors import AdapterError
from profiler.types import ModelSpec
from profiler.variants.reading import read_variant
from profiler.variants.types import VariantLimits
from testkit import checkpoints as make
from testkit.tiny_families import TINY, Tiny
from workers.compression.job import Job, compress
from workers.compression.methods.magnitude import magnitude

ADAPTABLE = {"Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3"}
OTHERS = [tiny for tiny in TINY if tiny.family not in ADAPTABLE and not tiny.title]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_model(make.write_model(tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize("file", ["adapter_config.json", "delta.json"])
def test_adapters_and_deltas_name_the_architecture(tmp_path: Path, base: ModelSpec, file: str) -> None:
    """The adapter is refused even where every shape would fit: the meaning of a norm or an embedding
    differs."""
    gemma = replace(base, architecture="GemmaForCausalLM", linear_shapes={})
    make.write_adapter(tmp_path)
    if file == "delta.json":
        (tmp_path / "adapter_config.json").unlink()
        (tmp_path / file).write_text(json.dumps({"format": "ostinato-delta"}))
    with pytest.raises(AdapterError, match=r"GemmaForCausalLM are not supported yet.*Llama, Mistral"):
        read_variant(tmp_path, gemma, VariantLimits(64))


@pytest.mark.parametrize("tiny", OTHERS, ids=lambda tiny: tiny.id)
def test_no_delta_of_refused_adapters_is_written(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model")
    assert not read_model(folder).adaptable
    with pytest.raises(AdapterError, match="not supported yet"):
        compress(Job(folder, folder, tmp_path / "delta", magnitude()))
    assert not (tmp_path / "delta").exists()


def test_a_gemma_of_an_older_record_is_to_be_registered_again(base: ModelSpec, tmp_path: Path) -> None:
    older = replace(base, architecture="Gemma3ForCausalLM", linear_shapes={})
    with pytest.raises(
        AdapterError, match=r"served no variants of .*; delete the base and register it again"
    ):
        read_variant(tmp_path, older, VariantLimits(64))
