"""Serve's start on a busy machine, whose proxies come later than Serve waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.runtime import start_serve
from controlplane.settings import Settings


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls. Serve's first `start` and its `run` wait in vain."""
    called: list[str] = []

    def start(**_: Any) -> None:
        called.append("start")
        if called.count("start") == 1:
            raise TimeoutError("HTTP proxies not available after 60s.")

    def run(*_: Any, **__: Any) -> None:
        called.append("run")
        raise TimeoutError("HTTP proxies not available after 60s.")

    monkeypatch.setattr("ray.init", lambda **_: called.append("init"))
    monkeypatch.setattr("ray.serve.start", start)
    monkeypatch.setattr("ray.serve.run", run)
    return called


def test_a_late_proxy_is_no_failure(steps: list[str]) -> None:
    start_serve.start("127.0.0.1:1", Settings())
    assert steps == ["init", "start", "start", "run"]


def test_other_errors_are_raised(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("ray.serve.start", broken)
    with pytest.raises(RuntimeError, match="no room"):
        start_serve.start("127.0.0.1:1", Settings())
    assert steps == ["init"]
