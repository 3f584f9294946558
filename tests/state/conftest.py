"""Stores of both kinds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.state import StateStore
from controlplane.state.stores import open_store


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that no other process uses. A busy machine has a minute for each answer of Redis."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/state/ostinato.db"
    patient = f"{request.getfixturevalue('redis_url')}?socket_timeout=60&socket_connect_timeout=60"
    return f"{patient}&prefix=test-{uuid.uuid4().hex}"


@pytest.fixture
def store(url: str) -> Iterator[StateStore]:
    store = open_store(url)
    yield store
    store.close()
