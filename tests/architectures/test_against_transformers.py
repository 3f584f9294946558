"""Every family against transformers' own modelling code: names, shapes and counts of what it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from profiler.architectures.registry import FAMILIES, describe
from profiler.checkpoint import read_model, spec_of
from profiler.errors import CheckpointError
from profiler.files import read_layout
from profiler.linears import EXPERT
from profiler.types import ModelSpec, linears_of
from testkit.tiny_families import PUBLISHED, TINY, Tiny

EVERY = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)


def test_there_is_a_case_for_every_architecture() -> None:
    assert {tiny.architecture for tiny in TINY} == set(FAMILIES)


def spec_from(config: Any) -> ModelSpec:
    """Our reading of a config as transformers would write it."""
    raw = json.loads(config.to_json_string(use_diff=False))
    return spec_of(describe(raw, Path("config.json")), 4)


@EVERY
def test_a_written_checkpoint_is_read_whole(tiny: Tiny, tmp_path: Path) -> None:
    """read_model refuses a missing, an extra or a misshapen tensor, so our names and shapes are theirs."""
    folder = tiny.write(tmp_path)
    stored = read_layout(folder / "model.safetensors")[0]
    spec = read_model(folder)
    assert spec.weight_bytes == sum(4 * math.prod(info.shape) for info in stored.values())
    assert spec.tied is (spec.head not in stored)
    assert stored[spec.embedding].shape == (spec.vocab_size, spec.hidden_size)
    expected = {f"{spec.layer_prefix}2.{name}".replace(EXPERT, "1") for name in spec.layer_shapes}
    assert expected <= set(stored)


@EVERY
def test_the_same_facts_as_transformers_has(tiny: Tiny) -> None:
    config = tiny.make_config()
    spec = spec_from(config)
    assert spec.weight_bytes == 4 * tiny.build(config).num_parameters()
    assert (spec.num_layers, spec.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert spec.num_heads == config.num_attention_heads
    assert spec.vocab_size == config.vocab_size
    assert spec.max_position == config.max_position_embeddings


@EVERY
def test_windows_are_those_of_transformers(tiny: Tiny) -> None:
    config = tiny.make_config()
    types = getattr(config, "layer_types", None)
    tokens = getattr(config, "sliding_window", None)
    if types is None:
        sliding = config.num_hidden_layers if tokens else 0
    else:
        sliding = types.count("sliding_attention")
    spec = spec_from(config)
    assert spec.sliding_layers == sliding
    assert spec.sliding_window == (tokens if sliding else None)


@pytest.mark.parametrize(
    "tiny", [t for t in TINY if t.family in ("Qwen2", "Qwen3", "Gemma2", "Gemma3")], ids=lambda tiny: tiny.id
)
def test_windows_follow_from_older_configs_without_layer_types(tiny: Tiny) -> None:
    config = tiny.make_config()
    raw = json.loads(config.to_json_string(use_diff=False))
    described = describe(raw, Path("config.json")).window
    old = {key: value for key, value in raw.items() if key not in ("layer_types", "_sliding_window_pattern")}
    if "_sliding_window_pattern" in raw:
        old["sliding_window_pattern"] = raw["_sliding_window_pattern"]
    assert describe(old, Path("config.json")).window == described


@EVERY
def test_a_missing_tensor_and_one_too_many_are_named(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = tiny.write(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[len(tensors) // 2]
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_model(tmp_path)
    save_file({**tensors, "model.layers.0.odd.weight": tensors[name]}, path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.odd"):
        read_model(tmp_path)


@EVERY
def test_kv_heads_are_those_of_the_cache(tiny: Tiny) -> None:
    """One token through the real model: its cache has N heads of M features."""
    import torch
    import transformers

    config = tiny.make_config()
    config._attn_implementation = "eager"
    model = getattr(transformers, tiny.architecture)(config).eval()
    with torch.inference_mode():
        cache = model(torch.tensor([[3]]), use_cache=True).past_key_values
    keys = cache.layers[0].keys
    spec = spec_from(config)
    copied = tiny.family == "Falcon" and spec.num_kv_heads > 1  # transformers repeats its KV heads first
    heads = spec.num_heads if copied else spec.num_kv_heads
    assert tuple(keys.shape) == (1, heads, 1, spec.head_dim)


@pytest.mark.parametrize("name", PUBLISHED)
def test_our_sizes_equal_published_ones(name: str) -> None:
    tiny, parameters = PUBLISHED[name]
    config = tiny.make_config()
    assert spec_from(config).weight_bytes == 4 * parameters == 4 * tiny.build(config).num_parameters()


def test_mixtral_uses_a_quarter_of_its_experts() -> None:
    """46.7 billion parameters, of which a token passes 12.9 billion (Jiang et al., 2024, table 1: 13B)."""
    spec = spec_from(Tiny("Mixtral", {}).make_config())
    idle = sum(linear.elements * (1 - linear.active / linear.experts) for linear in linears_of(spec).values())
    active = spec.weight_bytes / 4 - spec.num_layers * idle
    assert active == pytest.approx(12.9e9, rel=0.005)
