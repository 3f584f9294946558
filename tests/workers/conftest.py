"""The shared parts of tests of the real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from testkit.workers.variant_lab import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A base of few layers with variants of every kind, written once for all who only read them."""
    from testkit.workers import variant_lab  # here, for it imports torch

    return variant_lab.written(smollm2_folder, tmp_path_factory.mktemp("variants"))


@pytest.fixture
def own_environment() -> Iterator[None]:
    """What a launch sets of its process is set back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
