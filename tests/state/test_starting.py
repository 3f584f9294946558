"""A process that starts together with its store waits for it, and reports at once what waiting does not
change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from controlplane.errors import Unavailable
from controlplane.state import stores
from controlplane.state.stores import open_store_at_start
from testkit.redis_server import RedisServer

pytestmark = pytest.mark.slow  # a real Redis


def no_engines() -> tuple[str, ...]:
    return ()


def test_a_store_that_starts_later_is_waited_for(
    start_redis: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis()
    server.kill()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: server.start())
    monkeypatch.setattr(stores, "time", clock)  # it starts while it is waited for
    store = open_store_at_start(server.url, no_engines, wait_s=120)
    assert store.revision() == 1, "its identity"
    assert "waiting for the state store" in caplog.text
    store.close()


def test_a_store_that_does_not_come_is_an_error_in_the_end(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis()
    server.kill()
    with pytest.raises(Unavailable, match="cannot be used"):
        open_store_at_start(server.url, no_engines, wait_s=0.1)


def test_a_wrong_password_is_an_error_at_once(start_redis: Callable[..., RedisServer]) -> None:
    server = start_redis()
    with redis.Redis(port=server.port) as client:
        client.config_set("requirepass", "right")
    with pytest.raises(Unavailable, match="refused the login"):
        open_store_at_start(server.url.replace("redis://", "redis://:wrong@"), no_engines)


def test_a_damaged_file_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Unavailable):
        open_store_at_start(f"sqlite://{tmp_path}/state.db", no_engines)
