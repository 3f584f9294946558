"""Running installations, and the files they may read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from installations import Installation, Start

from controlplane import controller as controller_module
from controlplane.settings import Settings
from workers import asgi


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("api-files")
    checkpoints.write_model(root / "base")
    checkpoints.write_model(root / "other")
    for name in ("v1", "v2"):
        checkpoints.write_adapter(root / name)
    pairs = {**checkpoints.pair(0, "q_proj", 64), **checkpoints.pair(1, "q_proj", 64)}
    checkpoints.write_adapter(root / "rank", {"r": 64, "target_modules": ["q_proj"]}, pairs)
    checkpoints.write_adapter(root / "modules", {"target_modules": ["lm_head"]})
    weights = {name: t[:, :3] if "lora_A" in name else t for name, t in checkpoints.lora_weights().items()}
    checkpoints.write_adapter(root / "shape", None, {n: t.copy() for n, t in weights.items()})
    checkpoints.write_model(root / "torn")
    (root / "torn/model.safetensors").write_bytes(b"\x08")
    return root


@pytest.fixture
def start(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start an installation with these settings."""
    monkeypatch.setattr(asgi, "GRACE_S", 0.02)
    monkeypatch.setattr(controller_module, "TICK_S", 0.005)
    monkeypatch.setattr(controller_module, "OBSERVE_EVERY_S", 0.05)
    monkeypatch.setattr(controller_module, "RETRY_S", 0.05)
    with contextlib.ExitStack() as stack:

        def begin(**options: Any) -> Installation:
            settings = Settings(
                home=tmp_path / "home", allowed_roots=str(files), engine="echo", max_model_len=64, **options
            )
            return stack.enter_context(Installation(settings, files).running())

        yield begin


@pytest.fixture
def fresh(start: Start) -> Installation:
    """Nothing is registered."""
    return start(max_body_bytes=20_000)


@pytest.fixture
def served(fresh: Installation) -> Installation:
    """A base and a variant are deployed."""
    fresh.up("v1")
    return fresh
