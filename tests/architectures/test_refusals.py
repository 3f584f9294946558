"""Unservable models are refused by key and reason; no file causes another error."""

from __future__ import annotations

import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.architectures.reader import LIMITS
from profiler.architectures.registry import FAMILIES, describe
from profiler.checkpoint import read_model, spec_of
from profiler.errors import CheckpointError
from profiler.fingerprints.config import fingerprint_config
from profiler.types import ModelSpec
from testkit import checkpoints as make
from testkit.tiny_families import TINY, Tiny

WHERE = Path("config.json")
FIRST = {tiny.architecture: tiny for tiny in reversed(TINY)}
Configs = dict[str, dict[str, Any]]


def raw_of(tiny: Tiny) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(tiny.make_config().to_json_string(use_diff=False))
    return raw


@pytest.fixture(scope="module")
def configs() -> Configs:
    return {architecture: raw_of(tiny) for architecture, tiny in FIRST.items()}


SOME_WINDOWS = {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1}
MANY_EXPERTS = {"num_local_experts": 4096, "num_hidden_layers": 1024}


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Qwen2", {"head_dim": 8}, "expected head_dim to be hidden_size / heads .* got 8"),
        ("Qwen2", SOME_WINDOWS, "use_sliding_window"),
        ("Qwen3", {"attention_bias": True}, "attention_bias.*o_proj"),
        ("Gemma", {"attention_bias": True}, "attention_bias"),
        ("Gemma", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("Gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("Gemma3", {"use_bidirectional_attention": True}, "generate"),
        ("Gemma3", {"layer_types": ["full_attention"]}, "each of the 3 layers, got 1"),
        ("Gemma3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("Phi", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("Phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("Phi", {"intermediate_size": 24}, "intermediate_size.*64"),
        ("Phi", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("Phi3", {"attention_bias": True}, "attention_bias"),
        ("Falcon", {"num_attention_heads": 3}, "divisible by the 3 attention heads, got 16"),
        (
            "Falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 3},
            "divisible by the 3 key/value heads",
        ),
        ("Falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ("GPTJ", {"rotary_dim": 3}, "rotary_dim.*even"),
        ("GPTJ", {"rotary_dim": 6}, "rotary_dim.*at most 4"),
        ("GPTJ", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("GPTJ", {"hidden_size": 32}, "n_embd is 16, but hidden_size is 32"),
        ("Mixtral", {"num_experts_per_tok": 4}, "num_experts_per_tok of at most the 3 experts, got 4"),
        ("Mixtral", {"num_local_experts": 4097}, "num_local_experts.*4096"),
        ("Mixtral", MANY_EXPERTS, "matrices"),
        ("Qwen2Moe", {"qkv_bias": False}, "qkv_bias"),
        ("Qwen2Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step.*the layers differ"),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("Qwen3Moe", {"mlp_only_layers": [1]}, "mlp_only_layers.*the layers differ"),
        ("Qwen3Moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("Qwen3Moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("Qwen3Moe", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_options_that_cannot_be_served(
    configs: Configs, architecture: str, changes: dict[str, Any], words: str
) -> None:
    raw = {**configs[f"{architecture}ForCausalLM"], **changes}
    with pytest.raises(CheckpointError, match=words):
        describe(raw, WHERE)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("value", [0, -1, 10**9, "16", 2.0, True, [16]])
def test_every_size_is_checked(configs: Configs, architecture: str, value: Any) -> None:
    """Whatever key of LIMITS a family reads: too small, too large or of another type, it is named."""
    raw = configs[architecture]
    read = [key for key in LIMITS if type(raw.get(key)) is int and key not in _unread(raw)]
    assert len(read) >= 5
    for key in read:
        with pytest.raises(CheckpointError, match=key):
            describe({**raw, key: value}, WHERE)


def _unread(raw: dict[str, Any]) -> set[str]:
    """Sizes that transformers writes but that do not matter: windows that are off, the KV heads of an old
    Falcon, which has one, and the width of dense layers where all have experts.
    """
    unread = {"sliding_window", "sliding_window_pattern", "num_kv_heads"}
    return unread | ({"intermediate_size"} if "moe_intermediate_size" in raw else set())


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_missing_size_is_named(configs: Configs, architecture: str) -> None:
    raw = configs[architecture]
    for key in {"hidden_size", "n_embd", "vocab_size", "num_hidden_layers", "n_layer"} & set(raw):
        with pytest.raises(CheckpointError, match=key):
            describe({k: v for k, v in raw.items() if k != key}, WHERE)


@pytest.mark.parametrize("found", [{"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4}])
def test_quantized_checkpoints_are_refused_by_method(configs: Configs, found: dict[str, Any]) -> None:
    for raw in configs.values():
        with pytest.raises(
            CheckpointError, match=f"{found['quant_method']}.*quantized checkpoints are not served"
        ):
            describe({**raw, "quantization_config": found}, WHERE)


def test_an_unknown_architecture_names_what_is_missing_and_what_there_is() -> None:
    with pytest.raises(CheckpointError, match=r"OPTForCausalLM.*tensors.*LlamaForCausalLM.*Qwen3MoeFor"):
        describe({"architectures": ["OPTForCausalLM"]}, WHERE)


# --- any mutation: a spec or a CheckpointError, soon and without much memory ------------------------------

SOON_MS = 10_000  # it takes a few; a busy disk may hold one up for seconds


def _check_outcome(act: Callable[[], ModelSpec]) -> None:
    """A sound spec, or a CheckpointError of readable length; anything else escapes and fails the test."""
    message = ""
    try:
        spec = act()
    except CheckpointError as error:
        message = str(error)
        spec = None
    assert len(message) < 3000
    if spec is not None:
        assert spec.weight_bytes > 0
        assert spec.num_heads % spec.num_kv_heads == 0


NUMBERS = st.integers(-2, 5000) | st.sampled_from([2**31, 2**63, 10**30, 1024, 4096])
LISTS = st.lists(st.integers(0, 3) | st.sampled_from(["full_attention", "sliding_attention", ""]), max_size=4)
VALUES = NUMBERS | st.booleans() | st.none() | LISTS | make.JSON
MORE_KEYS = {"attention_bias", "mlp_bias", "qkv_bias", "layer_types", "mlp_only_layers", *LIMITS}


@settings(max_examples=4 * settings().max_examples, deadline=SOON_MS)
@given(data=st.data())
def test_any_mutation_of_a_config_gives_a_spec_or_an_error(configs: Configs, data: st.DataObject) -> None:
    raw = dict(configs[data.draw(st.sampled_from(sorted(configs)))])
    keys = st.lists(st.sampled_from(sorted({*raw, *MORE_KEYS})), min_size=1, max_size=3, unique=True)
    for key in data.draw(keys):
        raw[key] = data.draw(VALUES, label=key)

    def act() -> ModelSpec:
        fingerprint_config(raw, 1)
        return spec_of(describe(raw, WHERE), 2)

    _check_outcome(act)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: tiny.write(root / name) for name, tiny in FIRST.items()}


@settings(deadline=SOON_MS)
@given(data=st.data())
def test_any_damage_to_a_file_gives_a_spec_or_an_error(written: dict[str, Path], data: st.DataObject) -> None:
    """A few bytes of the header or the config changed, or the file cut anywhere."""
    source = written[data.draw(st.sampled_from(sorted(written)))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / file).write_bytes((source / file).read_bytes())
        target = folder / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
        raw = bytearray(target.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, min(len(raw), 6000) - 1))] = data.draw(st.integers(0, 255))
        end = data.draw(st.just(len(raw)) | st.integers(0, len(raw)))
        target.write_bytes(raw[:end])
        _check_outcome(lambda: read_model(folder))


def _header(folder: Path) -> dict[str, Any]:
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


@settings(deadline=SOON_MS)
@given(data=st.data())
def test_any_renamed_retyped_or_reshaped_tensor_is_refused(
    written: dict[str, Path], data: st.DataObject
) -> None:
    """The header stays sound safetensors; only the model it describes is another."""
    source = written[data.draw(st.sampled_from(sorted(written)))]
    header = _header(source)
    size = max(entry["data_offsets"][1] for entry in header.values())
    name = data.draw(st.sampled_from(sorted(header)))
    entry = header.pop(name)
    match data.draw(st.sampled_from(["name", "dtype", "shape"])):
        case "name":
            name = data.draw(st.text(max_size=20).filter(lambda new: new not in header and new != name))
        case "dtype":
            entry = {**entry, "dtype": "I32"}
        case "shape":
            entry = {**entry, "shape": [1, *entry["shape"]]}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        for file in ("config.json", "tokenizer.json"):
            (folder / file).write_bytes((source / file).read_bytes())
        made = make.raw_safetensors({**header, name: entry}, bytes(size))
        (folder / "model.safetensors").write_bytes(made)
        with pytest.raises(CheckpointError):
            read_model(folder)


@pytest.mark.slow
def test_the_largest_config_is_read_soon_and_in_little_memory(tmp_path: Path) -> None:
    """As many tensors as are allowed, over a file that holds none: named as missing, not built."""
    raw = raw_of(Tiny("Mixtral", {"num_hidden_layers": 20, "num_local_experts": 4096}))
    make.write_model(tmp_path, raw, {})
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="missing"):
        read_model(tmp_path)
    taken, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 20
    assert peak < 300e6
