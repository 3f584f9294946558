"""Running installations, and the files they may read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.api.request_limits import RequestLimits
from controlplane.controller import controller as controller_module
from controlplane.gateway.rate_book import LARGE_BODY_BYTES
from controlplane.settings import Settings
from testkit import checkpoints
from testkit.api.installations import Installation, Start
from testkit.in_memory import TWO_NODES
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


@contextlib.contextmanager
def starting(home: Path, files: Path) -> Iterator[Start]:
    """Start installations that end with this context."""
    with contextlib.ExitStack() as stack:
        quick = stack.enter_context(pytest.MonkeyPatch.context())
        quick.setattr(asgi, "GRACE_S", 0.02)
        quick.setattr(controller_module, "TICK_S", 0.005)
        quick.setattr(controller_module, "OBSERVE_EVERY_S", 0.05)
        quick.setattr(controller_module, "RETRY_S", 0.05)

        def begin(
            limits: RequestLimits | None = None, large_body_bytes: float = LARGE_BODY_BYTES, **options: Any
        ) -> Installation:
            settings = Settings(
                home=home,
                allowed_roots=str(files),
                engine="echo",
                max_model_len=64,
                **{"max_lora_rank": 16, **options},
            )
            return stack.enter_context(
                Installation(
                    settings,
                    files,
                    limits=limits or RequestLimits(),
                    large_body_bytes=large_body_bytes,
                ).running()
            )

        yield begin


@pytest.fixture
def start(tmp_path: Path, files: Path) -> Iterator[Start]:
    """Start an installation with these settings."""
    with starting(tmp_path / "home", files) as begin:
        yield begin


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Iterator[Start]:
    """The same for a module's tests that change nothing."""
    with starting(tmp_path_factory.mktemp("shared") / "home", files) as begin:
        yield begin


@pytest.fixture
def fresh(start: Start) -> Installation:
    """Nothing is registered."""
    return start(max_body_bytes=20_000)


@pytest.fixture
def two_bases(fresh: Installation) -> Installation:
    """Registered on two nodes, either of which has room for both."""
    fresh.cluster.devices = TWO_NODES
    for name in ("base", "second"):
        assert fresh.register(name, folder="base")["phase"] == "Ready"
    return fresh


@pytest.fixture
def served(fresh: Installation) -> Installation:
    """A base and a variant are deployed."""
    fresh.up("v1")
    return fresh


@pytest.fixture(scope="module")
def standing(start_shared: Start) -> Installation:
    """The same, for tests that change nothing and count nothing."""
    made = start_shared()
    made.up("v1")
    return made
