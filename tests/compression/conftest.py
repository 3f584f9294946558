"""A base and a fine-tune of it, written once for the tests of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit import random_variants as make


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    return make.write_tuned(base, base.parent / "tuned", 1)
