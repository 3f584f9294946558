"""Tests that kill processes under load: the kills, and the conditions that must hold afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from testkit.cluster.clusters import GIVE_UP_S, Cluster, until
from testkit.cluster.load import Load

BASE = "smol"
MODELS = (BASE, "forte", "smol:piano")
ENGINE_ERRORS = {"502 engine_failed", "503 unavailable", "event engine_failed", "event unavailable"}


def strike(load: Load, victim: Callable[[], psutil.Process]) -> tuple[float, float]:
    """Kill -9 the victim under load. Returns the seconds from then to the first new success, and to the
    last failure."""
    until(lambda: load.successes_since(0) >= 16, "answers before the kill")
    dying = victim()
    dying.kill()
    killed = time.monotonic()
    dying.wait(GIVE_UP_S)

    def steady() -> bool:
        return load.successes_since(max(killed, load.last_failure())) >= 24

    until(lambda: victim().pid != dying.pid, "a new process")
    until(steady, "24 answers in a row")
    recovered = min(o.ended for o in load.outcomes if o.error is None and o.begun > killed)
    return recovered - killed, max(0.0, load.last_failure() - killed)


def report(what: str, load: Load, times: tuple[float, float]) -> None:
    longest = max(o.ended - o.begun for o in load.outcomes)
    print(
        f"\n{what}: first new answer {times[0]:.1f} s, last failure {times[1]:.1f} s after kill -9; "
        f"{len(load.outcomes)} requests, errors {dict(load.errors())}, longest request {longest:.1f} s"
    )


def assert_kept(cluster: Cluster, before: dict[str, set[str]]) -> None:
    def same() -> bool:
        after = cluster.records()
        assert after["models"] == before["models"]
        assert after["deployments"] == before["deployments"]
        assert after["operations"] >= before["operations"]
        return True

    until(same, "the records from before")


def answers(cluster: Cluster, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return cluster.http.post("/v1/chat/completions", json=body).status_code == 200
