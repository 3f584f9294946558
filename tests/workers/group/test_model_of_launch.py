"""The folder that a launch gives to vLLM for a model: the registered files, with the registered weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from profiler.checkpoint import read_model
from testkit.engine_configs import echo_config
from testkit.tiny_families import TINY
from workers.group.launch import Launch, LaunchError
from workers.messages import EngineConfig

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return TINY[0].write(tmp_path / "model")


def config_of(folder: Path) -> EngineConfig:
    return replace(echo_config(), model_path=str(folder), fingerprint=read_model(folder).fingerprint)


def begun(config: EngineConfig) -> Path:
    launch = Launch(config)
    launch.begin()
    launch.close()
    return Path(launch.config.model_path)


def test_foreign_files_in_a_model_s_folder_are_hidden_from_vllm(folder: Path) -> None:
    config, weights = config_of(folder), load_file(folder / "model.safetensors")
    for stray in ("consolidated.safetensors", "a_before_training.safetensors", "adapter_model.safetensors"):
        save_file(weights, folder / stray)
    for name in ("params.json", "hf_quant_config.json", "consolidated.safetensors.index.json"):
        (folder / name).write_text("{}")
    given = begun(config)
    assert sorted(path.name for path in given.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (given / "model.safetensors").resolve() == folder / "model.safetensors"


def test_the_path_stays_the_same(folder: Path) -> None:
    """vLLM keeps compiled code by the path of the model."""
    config = config_of(folder)
    first = begun(config)
    save_file({"a": torch.zeros(1)}, folder / "stray.safetensors")
    assert begun(config) == first
    other = TINY[0].write(folder.parent / "other")
    assert begun(config_of(other)) != first


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder.parent / "file"))
    launch = Launch(config_of(folder))
    launch.begin()
    given = Path(launch.config.model_path)
    assert (given / "model.safetensors").is_file()
    launch.close()
    assert not given.exists()


def test_weights_that_were_changed_since_they_were_registered_are_not_started(folder: Path) -> None:
    config = config_of(folder)
    path = folder / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(LaunchError, match="differ from those registered as b; restore the"):
        Launch(config).begin()
    path.unlink()
    with pytest.raises(LaunchError, match=r"can no longer be read: expected model\.safetensors"):
        Launch(config).begin()
    assert begun(replace(config, load_format="dummy", fingerprint="")).name != folder.name


def test_an_engine_that_makes_up_its_weights_can_check_variants_against_the_headers(folder: Path) -> None:
    given = begun(replace(config_of(folder), load_format="dummy"))
    assert read_model(given).fingerprint == read_model(folder).fingerprint


@pytest.mark.parametrize(("said", "read"), [("auto", None), ("torch.bfloat16", "bfloat16")])
def test_a_type_that_transformers_cannot_read_is_corrected(folder: Path, said: str, read: str | None) -> None:
    """AutoConfig fails on both; registration takes them for what they mean."""
    where = folder / "config.json"
    where.write_text(json.dumps({**json.loads(where.read_text()), "dtype": said}))
    given = begun(config_of(folder)) / "config.json"
    assert json.loads(given.read_text()).get("dtype") == read
    assert json.loads(where.read_text())["dtype"] == said
