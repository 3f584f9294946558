from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fake_api import FakeApi, serve


@pytest.fixture(scope="session")
def running_api() -> Iterator[FakeApi]:
    yield from serve(FakeApi())


@pytest.fixture
def api(running_api: FakeApi) -> FakeApi:
    """The server with its default script and nothing asked yet."""
    running_api.reset()
    return running_api


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A URL at which nothing answers: its port is taken, but nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
