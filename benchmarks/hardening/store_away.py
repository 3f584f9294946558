"""The store is gone, or hangs, for minutes: inference must not notice, and gateways must stay ready.

Redis is killed (connections are refused at once) or stopped (they hang), and comes back with its data.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.hardening.kills import Operator
from benchmarks.hardening.probing import Probe, waiting_for
from benchmarks.live.groups import Running
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store
from testkit.redis_server import RedisServer

EVERY_S = 0.1  # so often each model is asked
BACK_S = 300.0


def measure(
    running: Running, redis: RedisServer, adapters: Sequence[Path], minutes: float
) -> list[dict[str, Any]]:
    """A row for each way to be away."""
    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "killed": (redis.kill, redis.start),
        "stopped": (
            lambda: os.kill(redis.process.pid, signal.SIGSTOP),
            lambda: os.kill(redis.process.pid, signal.SIGCONT),
        ),
    }
    return [
        {"redis": way, **_away(running, redis, adapters, 60 * minutes, leave, come_back)}
        for way, (leave, come_back) in ways.items()
    ]


def _away(
    running: Running,
    redis: RedisServer,
    adapters: Sequence[Path],
    seconds: float,
    leave: Callable[[], None],
    come_back: Callable[[], None],
) -> dict[str, Any]:
    headers = running.headers

    def probe(method: str, path: str, body: Any = None) -> Probe:
        return Probe(running.cluster.url, (method, path, body), every_s=EVERY_S, headers=headers)

    store = open_store(redis.url)
    operator = Operator(running, adapters, Repository(store))
    asked = [
        probe("POST", "/v1/completions", {"model": m, "prompt": "w1 w2", "max_tokens": 2})
        for m in running.models
    ]
    ready = probe("GET", "/readyz")
    with closing(store), ExitStack() as stack:
        operator.change()
        before = len(operator.acknowledged)
        for one in (*asked, ready):
            stack.enter_context(one)
        time.sleep(min(5.0, seconds))
        leave()
        try:
            time.sleep(seconds)
        finally:
            come_back()
        began_s = time.monotonic()
        came_back = waiting_for(lambda: _changes(operator), BACK_S) is not None
        back_s = round(time.monotonic() - began_s, 2) if came_back else None
        verified = operator.verify()
    return {
        "seconds": seconds,
        "completions": {m: one.summary() for m, one in zip(running.models, asked, strict=True)},
        "ready": ready.summary(),
        "failures": sorted({failure for one in (*asked, ready) for failure in one.failed}),
        "acknowledged_before": before,
        "first_change_after_s": back_s,
        "operations": verified,
    }


def _changes(operator: Operator) -> bool:
    """Whether a registration and a deletion were acknowledged."""
    before = len(operator.acknowledged)
    operator.change()
    return len(operator.acknowledged) == before + 2
