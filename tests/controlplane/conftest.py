"""A real SQLite store, real files, an in-memory cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.controller import controller, group_actions, launch_action, profile_actions
from controlplane.planning import autoscaling, rescheduling
from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store
from testkit import checkpoints
from testkit.controlplane.world import World

NAN_TENSOR = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    store = open_store(f"sqlite://{tmp_path}/state.db")
    yield store
    store.close()


@pytest.fixture
def repository(store: StateStore) -> Repository:
    return Repository(store)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, adapters that fit it and some that do not."""
    root = tmp_path_factory.mktemp("files")
    checkpoints.write_model(root / "base")
    for name in ("v1", "v2"):
        checkpoints.write_adapter(root / name)
    checkpoints.write_adapter(root / "wide", {"r": 64}, _wide())
    checkpoints.write_adapter(root / "strange", {"target_modules": ["lm_head"]})
    checkpoints.write_model(root / "torn")
    (root / "torn/model.safetensors").write_bytes(b"\x08")
    checkpoints.write_adapter(root / "nan", weights=_with_a_nan())
    return root


def _wide() -> checkpoints.Tensors:
    return {**checkpoints.pair(0, "q_proj", 64), **checkpoints.pair(1, "q_proj", 64)}


def _with_a_nan() -> checkpoints.Tensors:
    weights = checkpoints.lora_weights()
    weights[NAN_TENSOR][2, 1] = float("nan")
    return weights


@pytest.fixture
def settings(tmp_path: Path, files: Path) -> Settings:
    return Settings(
        home=tmp_path / "home", allowed_roots=str(files), engine="echo", max_model_len=64, max_lora_rank=16
    )


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path) -> World:
    return World(settings, repository, files)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that looks, waits and tries again within milliseconds."""
    monkeypatch.setattr(controller, "TICK_S", 0.002)
    monkeypatch.setattr(controller, "OBSERVE_EVERY_S", 0.02)
    monkeypatch.setattr(controller, "RETRY_S", 0.01)
    monkeypatch.setattr(controller, "MAX_RETRY_S", 0.02)
    monkeypatch.setattr(rescheduling, "FIRST_DELAY_S", 0.005)
    monkeypatch.setattr(rescheduling, "MAX_DELAY_S", 0.02)
    monkeypatch.setattr(launch_action, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(launch_action, "SAMPLED_S", 0.02)
    monkeypatch.setattr(launch_action, "AWAITED_S", 0.02)
    monkeypatch.setattr(profile_actions, "LOOK_S", 0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of scaling and draining that a test can wait for."""
    monkeypatch.setattr(autoscaling, "UP_S", 0.1)
    monkeypatch.setattr(autoscaling, "DOWN_S", 0.3)
    monkeypatch.setattr(group_actions, "QUIET_S", 0.02)
    monkeypatch.setattr(group_actions, "LOOK_S", 0.01)
