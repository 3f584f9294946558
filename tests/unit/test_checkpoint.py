"""Reading a checkpoint: what it says is right, and whatever is wrong with it is said in one error type."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import files
from profiler.checkpoint import read_model
from profiler.errors import CheckpointError
from profiler.files import read_layout
from testkit import checkpoints as make


def test_the_real_smollm2_is_read(tmp_path: Path) -> None:
    """134,515,008 parameters, by the published count, from headers over a sparse file of the real size."""
    shapes = make.tensors(make.SMOLLM2)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    (tmp_path / "config.json").write_text(json.dumps(make.SMOLLM2))
    (tmp_path / "tokenizer.json").write_text("{}")
    raw = make.raw_safetensors(header)
    (tmp_path / "model.safetensors").write_bytes(raw)
    os.truncate(tmp_path / "model.safetensors", len(raw) + at)

    spec = read_model(tmp_path)

    assert spec.weight_bytes == 2 * 134_515_008
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.vocab_size, spec.dtype_bytes, spec.max_position) == (64, 49152, 2, 8192)
    assert spec.kv_bytes_per_token_per_layer == 2 * 3 * 64 * 2
    assert spec.linear_shapes["k_proj"] == (192, 576)
    assert spec.linear_shapes["down_proj"] == (576, 1536)


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {}),
        ("Qwen2ForCausalLM", {"qkv_bias": True}),
        ("Qwen3ForCausalLM", {"qk_norm": True}),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_counts_what_is_stored(
    tmp_path: Path, architecture: str, kinds: dict[str, bool], tied: bool
) -> None:
    dim = 4 if architecture == "Qwen2ForCausalLM" else 6  # Qwen2's must be hidden / heads
    cfg = make.config(architectures=[architecture], head_dim=dim, tie_word_embeddings=tied)
    stored = make.zeros(make.tensors(cfg, **kinds))
    spec = read_model(make.write_model(tmp_path, cfg, stored))
    assert spec.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert spec.adaptable


@pytest.mark.parametrize(
    ("architecture", "kinds", "mark"),
    [
        ("LlamaForCausalLM", {}, "ac57d5227e2a134e844fda6b53041aa22c42d005c7d8c2cb1ea7b5fb0ddb5be2"),
        ("MistralForCausalLM", {}, "0f1f0138ef8f0988c37138853a8ec0eb1bd1cac7c4c916b70a1f663810186ed2"),
        (
            "Qwen2ForCausalLM",
            {"qkv_bias": True},
            "ea4c4c778c8583b0757b67326d2a54f52ace55291e2025189e90f808cbc32a13",
        ),
        (
            "Qwen3ForCausalLM",
            {"qk_norm": True},
            "2635936c5c39d6255b91b2014771c63c5d0f6285a424bd294638baf6af01affa",
        ),
    ],
)
def test_fingerprints_stay_what_they_were(
    tmp_path: Path, architecture: str, kinds: dict[str, Any], mark: str
) -> None:
    """Written by the first version, for zeros: deltas that people have name their base by them."""
    cfg = make.config(architectures=[architecture], **({"head_dim": 4} if "qk_norm" in kinds else {}))
    assert read_model(make.write_model(tmp_path, cfg, **kinds)).fingerprint == mark


def test_bytes_are_counted_in_the_declared_type(tmp_path: Path) -> None:
    whole = read_model(make.write_model(tmp_path / "a"))
    half = read_model(make.write_model(tmp_path / "b", make.config(torch_dtype="float16")))
    bare = make.config()
    del bare["torch_dtype"]
    stored = make.zeros(make.tensors(bare), np.float16)
    undeclared = read_model(make.write_model(tmp_path / "c", bare, stored))
    assert whole.weight_bytes == 2 * half.weight_bytes == 2 * undeclared.weight_bytes


def test_shards_and_links_read_like_one_file(tmp_path: Path) -> None:
    single = make.write_model(tmp_path / "one")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in single.iterdir():
        (linked / file.name).symlink_to(file)
    assert read_model(single) == read_model(linked) == read_model(make.write_shards(tmp_path / "two"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\."),
        ({"hidden_size": "12"}, "hidden_size"),
        ({"hidden_size": 13}, "3 attention heads, got 13"),
        ({"num_key_value_heads": 2}, "2 key/value heads, got 3"),
        ({"vocab_size": 41}, r"embed_tokens.*40 rows.*vocab_size 41"),
        ({"tie_word_embeddings": False}, "lm_head"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"torch_dtype": "int8"}, "int8"),
        ({"quantization_config": {"bits": 4}}, "unnamed method"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
        ({"attention_bias": True}, r"proj\.bias"),
    ],
)
def test_a_config_that_lies_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    make.write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(make.config(**changes)))
    with pytest.raises(CheckpointError, match=words):
        read_model(tmp_path)


def test_extra_tensors_are_refused_but_not_those_that_engines_skip(tmp_path: Path) -> None:
    weights = make.zeros(make.tensors(make.config()))
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    weights["lm_head.weight"] = np.zeros((40, 12), np.float32)
    read_model(make.write_model(tmp_path / "fine", None, weights))
    weights["model.layers.0.mlp.experts.weight"] = np.zeros(2, np.float32)
    with pytest.raises(CheckpointError, match="experts"):
        read_model(make.write_model(tmp_path / "odd", None, weights))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (make.write_model(tmp_path) / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_model(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    weights = make.zeros(make.tensors(make.config()), np.int8)
    with pytest.raises(CheckpointError, match="I8"):
        read_model(make.write_model(tmp_path, None, weights))


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/passwd", "a.bin", 3, None, "absent.safetensors", "\0.safetensors"]
)
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, shard: object) -> None:
    make.write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": shard}}))
    with pytest.raises(CheckpointError):
        read_model(tmp_path)


def _entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "too few"),
        (b"\0" * 7, "too few"),
        (struct.pack("<Q", 100_000_001), "100000001"),
        (struct.pack("<Q", 50) + b"{}", "truncated"),
        (make.raw_safetensors(b"{not json"), "not valid JSON"),
        (make.raw_safetensors(b"[]"), "list"),
        (make.raw_safetensors(b"\xff\xfe"), "not valid JSON"),
        (make.raw_safetensors(b"[" * 100_000), "not valid JSON"),
        (make.raw_safetensors(b'{"a":{},"a":{}}'), "twice"),
        (make.raw_safetensors({"a": _entry(0, 4), "b": _entry(2, 6)}, b"\0" * 6), "overlaps"),
        (make.raw_safetensors({"a": _entry(1, 4)}, b"\0" * 4), "hole"),
        (make.raw_safetensors({"a": _entry(0, 9)}, b"\0" * 4), "truncated"),
        (make.raw_safetensors({"a": _entry(0, 4)}, b"\0" * 9), "corrupt"),
        (make.raw_safetensors({"a": _entry(0, 4, [5])}, b"\0" * 4), "needs 5 bytes"),
        (make.raw_safetensors({"a": _entry(0, 4, [-2, -2])}, b"\0" * 4), "impossible shape"),
        (make.raw_safetensors({"a": _entry(0, 4, dtype="F4")}, b"\0" * 4), "F4"),
        (make.raw_safetensors({"a": {**_entry(0, 4), "data_offsets": [0]}}, b"\0" * 4), "data_offsets"),
        (make.raw_safetensors({"a": 3}), "int"),
    ],
)
def test_a_corrupt_file_s_error_says_how(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        read_layout(tmp_path / "x.safetensors")


def test_a_header_is_shorter_than_what_reading_it_would_cost(tmp_path: Path) -> None:
    """A file that is mostly a hole says how long its header is; nothing of it is read."""
    path = tmp_path / "x.safetensors"
    for length in (files.MAX_HEADER_BYTES + 1, 100_000_000, 2**63):
        with path.open("wb") as file:
            file.write(struct.pack("<Q", length))
            file.truncate(2**30)
        with pytest.raises(
            CheckpointError, match=f"header of {length} bytes, but at most {files.MAX_HEADER_BYTES}"
        ):
            read_layout(path)


def test_json_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    """Objects take a hundred times the memory of their text."""
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": [' + b"{}," * files.MAX_TOKENS + b"{}]}")
    with pytest.raises(CheckpointError, match=f"at most {files.MAX_TOKENS} are allowed"):
        files.read_json(path)
    path.write_text('{"a": "' + "a" * files.MAX_CONFIG_BYTES + '"}')
    with pytest.raises(
        CheckpointError, match=rf"config.json has \d+ bytes, but at most {files.MAX_CONFIG_BYTES}"
    ):
        files.read_json(path, files.MAX_CONFIG_BYTES)
    path.write_text('{"a": 1e999}')  # would become null in a record
    with pytest.raises(CheckpointError, match="the number 1e999 is too large"):
        files.read_json(path)


def test_the_largest_models_that_are_served_stay_within_the_bounds() -> None:
    """All of Qwen3-235B-A22B in one file: 94 layers of 128 experts."""
    header, at = {}, 0
    for layer in range(94):
        names = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
        names += ["input_layernorm", "post_attention_layernorm", "mlp.gate"]
        names += [f"mlp.experts.{e}.{p}_proj" for e in range(128) for p in ("gate", "up", "down")]
        for name in names:
            size = 2 * 4096 * 1536
            offsets = [at + 4 * 10**11, at + 4 * 10**11 + size]
            header[f"model.layers.{layer}.{name}.weight"] = {
                "dtype": "BF16", "shape": [4096, 1536], "data_offsets": offsets,
            }  # fmt: skip
            at += size
    raw = json.dumps(header).encode()
    assert len(raw) < files.MAX_HEADER_BYTES / 2
    assert len(files.parse_json(raw, "a header", "copy it again")) == len(header) > 36_000


def _survives(act: Callable[[], object]) -> None:
    """Either a result or a CheckpointError; anything else escapes and fails the test."""
    with contextlib.suppress(CheckpointError):
        act()


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_header_or_an_error(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(raw)
        _survives(lambda: read_layout(path))


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | make.JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | make.JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | make.JSON,
    }
)


@given(header=st.dictionaries(st.text(max_size=6), ENTRY | make.JSON, max_size=4), size=st.integers(0, 64))
def test_any_header_is_sound_or_an_error(header: dict[str, Any], size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(make.raw_safetensors(header, b"\0" * size))
        _survives(lambda: read_layout(path))
