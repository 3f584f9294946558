"""Fingerprints: transformers builds them and counts as many parameters as the arithmetic; they are small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiler.architectures.registry import describe
from profiler.checkpoint import read_model, spec_of
from profiler.errors import CheckpointError
from profiler.fingerprints.config import fingerprint_config
from profiler.fingerprints.folder import write_fingerprint
from testkit.tiny_families import PUBLISHED, TINY, Tiny

EVERY = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
WHERE = Path("config.json")


def raw_of(tiny: Tiny, **changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(tiny.make_config(**changes).to_json_string(use_diff=False))
    return raw


def parameters(tiny: Tiny, raw: dict[str, Any]) -> int:
    """The parameters of the model that transformers makes of a config.json."""
    import transformers

    cls = getattr(transformers, f"{tiny.config or tiny.family}Config")
    return int(tiny.build(cls.from_dict(raw)).num_parameters())


@EVERY
@pytest.mark.parametrize("layers", [1, 2])
def test_transformers_builds_the_model_and_counts_the_same_parameters(tiny: Tiny, layers: int) -> None:
    raw = raw_of(tiny)
    whole = spec_of(describe(raw, WHERE), 4)
    made = fingerprint_config(raw, layers)
    assert 4 * parameters(tiny, made) == replace(whole, num_layers=layers).weight_bytes
    same = set(raw) - {"num_hidden_layers", "n_layer", "layer_types", "max_window_layers"}
    assert {key: made[key] for key in same} == {key: raw[key] for key in same}
    assert set(made) == set(raw)


@EVERY
def test_all_layers_are_the_model_itself(tiny: Tiny) -> None:
    raw = raw_of(tiny)
    assert describe(fingerprint_config(raw, 3), WHERE) == describe(raw, WHERE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_two_fingerprints_give_the_whole_model(name: str) -> None:
    """MaverIQ's rule: the first layer and all around it, then as many more layers as there are."""
    tiny, expected = PUBLISHED[name]
    raw = raw_of(tiny)
    one, two = (parameters(tiny, fingerprint_config(raw, layers)) for layers in (1, 2))
    layers = describe(raw, WHERE).layers
    assert one + (layers - 1) * (two - one) == expected


def test_the_first_layers_keep_their_kind_of_attention() -> None:
    tiny = Tiny("Gemma2", {"num_hidden_layers": 4})
    raw = raw_of(tiny)
    assert fingerprint_config(raw, 1)["layer_types"] == ["sliding_attention"]
    assert fingerprint_config(raw, 3)["layer_types"] == raw["layer_types"][:3]
    windows = raw_of(Tiny("Qwen3", {"use_sliding_window": True, "max_window_layers": 2}))
    assert fingerprint_config(windows, 1)["max_window_layers"] == 1
    assert fingerprint_config(windows, 5)["max_window_layers"] == 2


@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize("changes", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_layers_that_differ_in_weights_are_refused_by_key(family: str, changes: dict[str, Any]) -> None:
    raw = {**raw_of(Tiny(family, {"num_hidden_layers": 4})), **changes}
    with pytest.raises(CheckpointError, match=f"{next(iter(changes))}.*the layers differ"):
        fingerprint_config(raw, 1)


@pytest.mark.parametrize("layers", [0, -1, 4, True, 1.0, "1", None])
def test_an_impossible_number_of_layers_is_refused(layers: Any) -> None:
    with pytest.raises(CheckpointError, match="at most the model's 3 layers"):
        fingerprint_config(raw_of(TINY[0]), layers)


@EVERY
def test_a_folder_without_weights_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "model")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    target = write_fingerprint(source, tmp_path / "fingerprint", 1)
    names = {path.name for path in target.iterdir()}
    assert (
        {"config.json", "tokenizer.json"}
        <= names
        <= {"config.json", "tokenizer.json", "generation_config.json"}
    )
    assert sum(path.stat().st_size for path in target.iterdir()) < 10_000
    assert parameters(tiny, json.loads((target / "config.json").read_text())) > 0
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_model(target)


def test_a_target_that_is_there_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    source = TINY[0].write(tmp_path / "model")
    with pytest.raises(CheckpointError, match="exists already"):
        write_fingerprint(source, source, 1)
    with (source / "tokenizer.json").open("wb") as file:
        file.truncate(65_000_000)
    with pytest.raises(CheckpointError, match="65000000"):
        write_fingerprint(source, tmp_path / "target", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
