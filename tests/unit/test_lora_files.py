"""Reading a LoRA adapter: it fits its base exactly, or the error says where it does not."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.types import ModelSpec
from profiler.variants.lora import parse_config
from profiler.variants.reading import read_manifest, read_variant
from profiler.variants.types import LoraManifest, VariantKind, VariantLimits
from testkit import checkpoints as make

LIMITS = VariantLimits(64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_model(make.write_model(tmp_path_factory.mktemp("base")))


def test_a_plain_adapter_is_read(tmp_path: Path, base: ModelSpec) -> None:
    spec = read_variant(make.write_adapter(tmp_path), base, LIMITS)
    assert (spec.kind, spec.max_rank, spec.bits) == (VariantKind.LORA, 4, ())
    assert spec.target_modules == ("q_proj", "down_proj")
    assert spec.weight_bytes == 2 * 4 * 4 * ((12 + 12) + (12 + 20))  # layers x rank x float32 x (in + out)


@pytest.mark.parametrize(
    "targets",
    ["all-linear", r".*\.(q|down)_proj", ["self_attn.q_proj", "mlp.down_proj"], "(a+)+$"],
)
def test_every_way_to_name_targets(tmp_path: Path, base: ModelSpec, targets: object) -> None:
    """The last is a pattern that would run for ever if it were run."""
    spec = read_variant(make.write_adapter(tmp_path, {"target_modules": targets}), base, LIMITS)
    assert spec.target_modules == ("q_proj", "down_proj")


@pytest.mark.parametrize("key", ["down_proj", "mlp.down_proj", r"layers\.1\.mlp\.down_proj"])
def test_rank_pattern_sets_single_ranks(tmp_path: Path, base: ModelSpec, key: str) -> None:
    first = 4 if "1" in key else 16
    weights = {**make.lora_weights(), **make.pair(0, "down_proj", first), **make.pair(1, "down_proj", 16)}
    spec = read_variant(
        make.write_adapter(tmp_path, {"rank_pattern": {key: 16}}, weights), base, VariantLimits(16)
    )
    assert spec.max_rank == 16
    with pytest.raises(AdapterError, match="rank"):
        read_variant(tmp_path, base, VariantLimits(15))


@pytest.mark.parametrize(
    ("changes", "scalings"),
    [
        ({}, {8 / 4}),
        ({"use_rslora": True}, {8 / 4**0.5}),
        ({"alpha_pattern": {"q_proj": 2}}, {2 / 4, 8 / 4}),
        ({"alpha_pattern": {r"layers\.1\.mlp\.down_proj": 3.0}, "use_rslora": True}, {8 / 2, 3 / 2}),
        ({"alpha_pattern": {r".*\.layers\.1\..*(q_proj|k_proj)$": 2, "q_proj": 6}}, {2 / 4, 6 / 4, 8 / 4}),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, {2 / 4, 8 / 4}),
        ({"lora_alpha": 2.5, "target_modules": ["q_proj", "down_proj", "W_pack", "lm_head"]}, {2.5 / 4}),
        ({"target_modules": ["q_proj", "down_proj", "o_proj"], "exclude_modules": ["o_proj"]}, {8 / 4}),
    ],
)
def test_the_scaling_is_read(
    tmp_path: Path, base: ModelSpec, changes: dict[str, Any], scalings: set[float]
) -> None:
    manifest = read_manifest(make.write_adapter(tmp_path, changes), base, LIMITS)
    assert isinstance(manifest, LoraManifest)
    assert {module.scaling for module in manifest.modules.values()} == scalings
    for name, module in manifest.modules.items():
        assert module.a.name == f"base_model.model.{name}.lora_A.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"r": 0}, "positive"),
        ({"r": True}, "positive"),
        ({"r": 65}, "65.*64"),
        ({"r": 8}, r"shape \(4, \d+\).*rank 8"),
        ({"rank_pattern": {"q_proj": -1}}, "positive"),
        ({"rank_pattern": {".*": 4, "(?!q)": 2, "q_proj": 8}}, r"rank_pattern.*\(\?!q\)"),
        ({"rank_pattern": {"(((a{100}){100}){100})": 4}}, "too large"),
        ({"rank_pattern": {r".*down_proj": 8}}, r"shape \(4, \d+\).*rank 8"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": "4"}}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"target_modules": ["q_proj"]}, "down_proj has weights.*target_modules"),
        ({"exclude_modules": ["mlp.down_proj"]}, "down_proj has weights.*exclude_modules"),
        ({"layers_to_transform": [0]}, "layers.1.*has weights.*layers_to_transform"),
        ({"target_modules": None}, "down_proj has weights.*target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": "(("}, "regular expression"),
        ({"target_modules": "(?i)" + "[a-\U0010ffff]" * 1000}, "longer than 2000"),  # takes 4 s to compile
    ],
)
def test_a_config_that_does_not_fit_is_named(
    tmp_path: Path, base: ModelSpec, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read_variant(make.write_adapter(tmp_path, changes), base, LIMITS)


AT = "base_model.model.model.layers"
A = f"{AT}.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({A: np.zeros((4, 13), np.float32)}, r"\(4, 13\)"),
        ({A: np.zeros((5, 12), np.float32)}, r"\(5, 12\)"),
        ({A: np.zeros((4, 12), np.int8)}, "I8"),
        ({f"{AT}.2.self_attn.q_proj.lora_A.weight": np.zeros((4, 12), np.float32)}, "2 layers"),
        ({f"{AT}.0.mlp.q_proj.lora_A.weight": np.zeros((4, 12), np.float32)}, "mlp.q_proj"),
        ({f"{AT}.0.self_attn.c_attn.lora_A.weight": np.zeros((4, 12), np.float32)}, "c_attn"),
        ({f"{AT}.0.self_attn.q_proj.lora_magnitude_vector": np.zeros(4, np.float32)}, "magnitude"),
        ({"base_model.model.lm_head.weight": np.zeros((40, 12), np.float32)}, "lm_head"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, base: ModelSpec, weights: make.Tensors, words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read_variant(make.write_adapter(tmp_path, None, {**make.lora_weights(), **weights}), base, LIMITS)


def test_incomplete_files_are_refused(tmp_path: Path, base: ModelSpec) -> None:
    lonely = make.lora_weights()
    del lonely[A]
    with pytest.raises(CheckpointError, match="only one of"):
        read_variant(make.write_adapter(tmp_path / "a", None, lonely), base, LIMITS)
    with pytest.raises(CheckpointError, match=r"has no tensors.*ZeRO-3"):
        read_variant(make.write_adapter(tmp_path / "b", None, {}), base, LIMITS)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_variant(tmp_path / "absent", base, LIMITS)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path, base: ModelSpec) -> None:
    folder = make.write_adapter(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="weights_only=True"):
        read_variant(folder, base, LIMITS)


@given(
    key=st.sampled_from([*make.LORA, "rank_pattern", "alpha_pattern", "init_lora_weights"]), value=make.JSON
)
def test_any_config_value_is_read_or_an_error(key: str, value: object) -> None:
    with contextlib.suppress(AdapterError):
        parse_config({**make.LORA, key: value}, 64)


@given(data=st.data())
def test_a_damaged_file_is_read_or_an_error(base: ModelSpec, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make.write_adapter(Path(name))
        path = folder / "adapter_model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[data.draw(st.integers(0, 1000))] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
        with contextlib.suppress(AdapterError, CheckpointError):
            read_variant(folder, base, LIMITS)
