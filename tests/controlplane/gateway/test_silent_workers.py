"""Workers whose process is stopped, as seen by a gateway: their traffic goes elsewhere, and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.gateway import base_workers, engine_limits, health_watch, load_reader
from controlplane.gateway.engine_client import EngineClient
from controlplane.gateway.engine_limits import EngineLimits
from controlplane.gateway.known_worker import KnownWorker
from controlplane.traffic.worker_health import Takes
from testkit.doors import Held, opened, report
from testkit.loops import until
from workers.messages import EngineCall, EngineHead, WorkerReport

WHOLE = EngineCall("/v1/completions", b'{"model": "b", "prompt": "a b"}')
STREAM = EngineCall("/v1/completions", b'{"model": "b", "prompt": "a b", "stream": true}')
# A server before an application that answers at once, notes when it was asked, or only begins to answer.
SERVER = """
import asyncio, json, sys
from testkit.doors import HEAD, opened, part

async def app(scope, receive, send):
    asked = json.loads((await receive())["body"])
    print("arrived", flush=True)
    await send(HEAD)
    if asked.get("begins"):
        await send(part(b"data: begun\\n\\n"))
        await asyncio.sleep(3600)
    await send(part(b"data: stopped\\n\\n", more=False))

async def main():
    async with opened(app) as door:
        print(door.address, door.secret, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
LIMITS = EngineLimits(first_byte_s=600.0, next_byte_s=600.0, silent_s=0.6, silent_cut_s=1.2)


class Stopping:
    """A worker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, secret: str) -> None:
        self._process = process
        self.report = WorkerReport(
            1, "n", (), "t", address=address, secret=secret, max_ongoing_requests=8, group="stopping"
        )

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    async def has_arrived(self) -> None:
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"arrived\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_workers, "LOOK_S", 0.1)
    monkeypatch.setattr(health_watch, "LOOK_S", 0.1)
    monkeypatch.setattr(engine_limits, "LOOK_S", 0.1)
    monkeypatch.setattr(base_workers, "REFRESH_S", 0.1)
    monkeypatch.setattr(load_reader, "LONGEST_OF_ONE_HEARD_S", 0.1)


@pytest.fixture
async def stopping(pytestconfig: pytest.Config) -> AsyncIterator[Stopping]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER,
        stdout=subprocess.PIPE,
        cwd=pytestconfig.rootpath,
        env={**os.environ, "PYTHONPATH": str(Path(pytestconfig.rootpath))},
    )
    try:
        assert process.stdout is not None
        address, secret = (await process.stdout.readline()).decode().split()
        yield Stopping(process, address, secret)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def client_of(*reports: WorkerReport, limits: EngineLimits = LIMITS) -> AsyncIterator[EngineClient]:
    client = EngineClient(_finding(*reports), 100, limits=limits)
    try:
        yield client
    finally:
        client.close()


def known(client: EngineClient, group: str) -> KnownWorker:
    (found,) = [w for w in client._bases["b"].directory.known if w.group == group]
    return found


async def heard(client: EngineClient, group: str = "stopping") -> KnownWorker:
    """The worker has reported its load: from then on its silence has a meaning."""
    await client._workers("b").directory.refresh()
    worker = known(client, group)
    await until(lambda: worker.load is not None)
    return worker


async def test_a_stopped_worker_gets_nothing_while_another_lives(stopping: Stopping) -> None:
    other = Held()
    other.may_answer.set()
    async with opened(other) as door, client_of(stopping.report, report(door)) as client:
        worker = await heard(client)
        stopping.signal(signal.SIGSTOP)
        # A request that went to the worker before its silence was known is moved and answered, too.
        replies = await asyncio.gather(*(client.call("b", WHOLE) for _ in range(4)))
        assert {reply.body for reply in replies} == {b"late"}
        await until(lambda: worker.takes is Takes.NONE)
        for _ in range(10):
            assert (await client.call("b", WHOLE)).body == b"late"
        assert worker.own == 0
        # It comes back: one request at a time, and all once it has answered one.
        stopping.signal(signal.SIGCONT)
        await until(lambda: worker.takes is not Takes.NONE)
        bodies = set()
        while b"data: stopped\n\n" not in bodies:
            bodies.add((await client.call("b", WHOLE)).body)
        await until(lambda: worker.takes is Takes.ALL)


async def test_a_stream_without_a_first_byte_is_moved_once(stopping: Stopping) -> None:
    other = Held(streams=True)
    async with opened(other) as door, client_of(stopping.report) as client:
        worker = await heard(client)
        stopping.signal(signal.SIGSTOP)
        items = client.stream("b", STREAM)
        first = asyncio.create_task(anext(items))
        await until(lambda: worker.own == 1)
        workers = client._workers("b")
        workers.directory._find = _finding(stopping.report, report(door))
        assert await first == EngineHead(200, "text/event-stream")
        assert await anext(items) == b"data: 1\n\n"
        assert other.asked == 1
        other.may_answer.set()
        assert [piece async for piece in items] == [b"late"]


def _finding(*reports: WorkerReport) -> Any:
    async def find(base: str) -> list[WorkerReport]:
        return list(reports)

    return find


async def test_a_stream_that_has_begun_is_cut_when_the_silence_lasts(stopping: Stopping) -> None:
    call = EngineCall(STREAM.path, json.dumps({"begins": True}).encode())
    async with client_of(stopping.report) as client:
        await heard(client)
        items = client.stream("b", call)
        await anext(items)
        assert await anext(items) == b"data: begun\n\n"
        stopping.signal(signal.SIGSTOP)
        with pytest.raises(errors.Cut, match="not responded for 1"):
            await anext(items)


async def test_the_only_worker_keeps_its_requests_when_it_was_silent_for_a_while(stopping: Stopping) -> None:
    """The machine is too busy: no request is refused, and no request without an answer so far is cut."""
    async with client_of(stopping.report, limits=replace(LIMITS, silent_cut_s=1e6)) as client:
        worker = await heard(client)
        # a request is sent, so the worker is watched
        assert (await client.call("b", WHOLE)).body == b"data: stopped\n\n"
        stopping.signal(signal.SIGSTOP)
        await until(lambda: (worker.seen.quiet or 0) >= LIMITS.rules.quiet)
        asking = [asyncio.create_task(client.call("b", WHOLE)) for _ in range(3)]
        await until(lambda: worker.own == 3)
        assert worker.takes is Takes.ALL
        stopping.signal(signal.SIGCONT)
        assert [(await task).body for task in asking] == [b"data: stopped\n\n"] * 3
        await until(lambda: worker.seen.is_proven)
