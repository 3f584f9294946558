"""A real SQLite store, real files, an in-memory cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest

from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store


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
    return root


def _wide() -> checkpoints.Tensors:
    return {**checkpoints.pair(0, "q_proj", 64), **checkpoints.pair(1, "q_proj", 64)}


@pytest.fixture
def settings(tmp_path: Path, files: Path) -> Settings:
    return Settings(home=tmp_path / "home", allowed_roots=str(files), engine="echo", max_model_len=64)
