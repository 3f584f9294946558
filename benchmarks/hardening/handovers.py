"""Changes of what decides, under load: another controller, another primary of the store, another version.

Clients ask the base and its variants all the time, and operators register and delete variants. No engine
may stop, what was acknowledged must be there once, and no request may fail but of a variant whose record a
gateway that starts cannot read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hardening import second_controller
from benchmarks.hardening.kills import Loop, Operator, of_role, reporting_gateways, title_of
from benchmarks.hardening.probing import Probe, waiting_for
from benchmarks.live.groups import BASE, Running
from controlplane.controller.leadership import LEASE_S
from controlplane.runtime import loopback
from controlplane.state.base import StateStore, Write
from controlplane.state.records import SCHEMA
from controlplane.state.repository import Repository
from controlplane.state.stores import open_store
from testkit.redis_pair import RedisPair

OPERATORS = 3
EVERY_S = 0.05  # so often each model is asked
Change = Callable[[Sequence[Operator]], dict[str, Any]]
STOPPED_S = LEASE_S + 8.0  # a controller is stopped for longer than its lease, not than Serve waits for it
SETTLED_S = 180.0
BACK = ("controller", "gateway", "gateway")  # what starts again with another version


def measure(
    running: Running, store_url: str, pair: RedisPair | None, adapters: Sequence[Path], seconds: float
) -> list[dict[str, Any]]:
    """A row for each; `seconds` of load before and after it. Without a `pair` the store has no failover."""
    changes: dict[str, Change] = {
        "two controllers": lambda operators: _two_controllers(running, operators),
        "the base's record corrupted": lambda _: _unreadable(
            running, store_url, seconds, {BASE: _corrupted}, ("controller",)
        ),
    }
    if pair is not None:
        changes["failover of the store"] = lambda _: _failover(pair)
    two = dict(zip(running.models[1:], (_of_tomorrow, _corrupted), strict=True))
    changes["a version back, which cannot read two variants"] = lambda _: _unreadable(
        running, store_url, seconds, two, BACK
    )
    return [
        {"what": what, **_under_load(running, store_url, adapters, seconds, change)}
        for what, change in changes.items()
    ]


def _under_load(
    running: Running,
    store_url: str,
    adapters: Sequence[Path],
    seconds: float,
    change: Change,
) -> dict[str, Any]:
    # None is just starting: it would not know what it cannot read.
    if (
        waiting_for(lambda: reporting_gateways(running) == len(of_role(running, "gateway")), SETTLED_S)
        is None
    ):
        raise RuntimeError(f"expected all gateways to answer within {SETTLED_S:.0f} s")
    engines = running.engine_pids()
    with closing(open_store(store_url)) as store:
        repository = Repository(store)
        operators = [Operator(running, adapters, repository) for _ in range(OPERATORS)]
        asked = {
            model: Probe(
                running.cluster.url,
                ("POST", "/v1/completions", {"model": model, "prompt": "w1 w2", "max_tokens": 2}),
                every_s=EVERY_S,
                headers=running.headers,
            )
            for model in running.models
        }
        with ExitStack() as stack:
            for work in (*asked.values(), *(Loop(operator.change) for operator in operators)):
                stack.enter_context(work)
            time.sleep(seconds)
            told = change(operators)
            time.sleep(seconds)
        verified = [operator.verify() for operator in operators]
    return {
        **told,
        "completions": {model: len(one.seconds) for model, one in asked.items()},
        "failures": {model: dict(Counter(one.failed)) for model, one in asked.items() if one.failed},
        "operations": {
            "acknowledged": sum(one["acknowledged"] for one in verified),
            **{bad: sum(len(one[bad]) for one in verified) for bad in ("lost", "doubled", "open")},
        },
        "engines_stopped": len({*engines} - {*running.engine_pids()}),
    }


def _two_controllers(running: Running, operators: Sequence[Operator]) -> dict[str, Any]:
    """The first is stopped for longer than its lease, the second acts; the first goes on, and is not let."""

    def acknowledged() -> int:
        return sum(len(operator.acknowledged) for operator in operators)

    (first,) = of_role(running, "controller")
    _second(running, "start")
    try:
        if waiting_for(lambda: _seconds_process(running) is not None, SETTLED_S) is None:
            raise RuntimeError(f"expected a second controller within {SETTLED_S:.0f} s")
        first.send_signal(signal.SIGSTOP)
        try:
            time.sleep(LEASE_S)
            before = acknowledged()  # each operator has one under way, and waits for its end
            time.sleep(STOPPED_S - LEASE_S)
            by_second = acknowledged() - before
        finally:
            first.send_signal(signal.SIGCONT)
        time.sleep(LEASE_S)
        both = first.is_running() and _seconds_process(running) is not None
    finally:
        _second(running, "stop")
    gone = waiting_for(lambda: _seconds_process(running) is None, SETTLED_S)
    told = {"stopped_s": STOPPED_S, "acknowledged_beside_the_stopped": by_second}
    return {**told, "both_ran_on": both, "second_gone_after_s": gone}


def _seconds_process(running: Running) -> psutil.Process | None:
    found = (p for p in running.processes() if second_controller.ROLE in title_of(p))
    return next(found, None)


def _second(running: Running, what: str) -> None:
    token = Path(running.cluster.home) / "ray-token"
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment = {**os.environ, **loopback.ENVIRONMENT, **auth}
    command = [sys.executable, "-m", second_controller.__name__, running.cluster.ray_address, what]
    subprocess.run(command, env=environment, check=True, timeout=SETTLED_S, stdout=subprocess.DEVNULL)


def _unreadable(
    running: Running,
    store_url: str,
    seconds: float,
    texts: Mapping[str, Callable[[str], str]],
    roles: Sequence[str],
) -> dict[str, Any]:
    """Deployments are written as `texts` has them, by model; one process of each of `roles` starts again and
    reads them. Then they are put right."""
    with closing(open_store(store_url)) as store:
        kept = store.snapshot(["deployment"]).entries["deployment"]
        before = {model: kept[model].value for model in texts}
        changed = {model: texts[model](text) for model, text in before.items()}
        if unchanged := [model for model in texts if changed[model] == before[model]]:
            raise RuntimeError(f"expected records that cannot be read, {unchanged} still can")
        _put(store, changed)
        began_s = time.monotonic()
        try:
            again = [(role, _again(running, role)) for role in roles]
            time.sleep(seconds)
        finally:
            _put(store, before)
    lasted_s = round(time.monotonic() - began_s, 1)
    return {"unreadable": sorted(texts), "unreadable_s": lasted_s, "started_again_after_s": again}


def _put(store: StateStore, texts: Mapping[str, str]) -> None:
    store.commit([Write("deployment", model, text, None) for model, text in texts.items()])


def _of_tomorrow(text: str) -> str:
    return text.replace(f'"schema":{SCHEMA}', f'"schema":{SCHEMA + 1},"of_tomorrow":1', 1)


def _corrupted(text: str) -> str:
    return text[: len(text) // 2]


def _again(running: Running, role: str) -> float | None:
    """One of the role is killed: seconds until there are as many again."""
    before = sorted(of_role(running, role), key=lambda process: process.create_time())
    before[0].kill()
    return waiting_for(
        lambda: len(of_role(running, role)) >= len(before) and before[0] not in of_role(running, role),
        SETTLED_S,
    )


def _failover(pair: RedisPair) -> dict[str, Any]:
    pair.fail_over()
    began_s = time.monotonic()
    pair.follow()
    return {"replica_again_after_s": round(time.monotonic() - began_s, 2)}
