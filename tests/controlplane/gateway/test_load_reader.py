"""A gateway's reading of workers' loads: real servers, older workers, and servers that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from controlplane.gateway import base_workers, load_reader
from controlplane.gateway.base_workers import BaseWorkers
from controlplane.gateway.engine_client import EngineClient
from controlplane.gateway.known_worker import KnownWorker
from controlplane.gateway.load_reader import LoadReader
from testkit.doors import HEAD, Held, opened, part, report
from testkit.engine_configs import echo_config
from testkit.loops import until
from workers import request_headers
from workers.load_lines import PATH, STALE_S, line_of
from workers.messages import EngineCall, WorkerLoad, WorkerReport
from workers.server.worker import Worker

ASK = EngineCall("/v1/completions", b'{"model": "b", "prompt": "a b"}')
LOAD = WorkerLoad(3, 2, 1, 0.5, 7, 0.02, 64, 0.1, ((7, "device"),))
LINE = line_of(LOAD)
HTTP = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_reader, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(base_workers, "REFRESH_S", 0.02)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Server:
    """Answers each connection by the next of these; `asked` are the heads that came."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.asked: list[bytes] = []
        self.at_s: list[float] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        self.at_s.append(time.monotonic())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await reader.read()  # until the other side leaves
        else:
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def listening(server: Server, proof: str = "") -> AsyncIterator[list[WorkerLoad]]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    heard: list[WorkerLoad] = []
    port = listener.sockets[0].getsockname()[1]
    reader = LoadReader(f"127.0.0.1:{port}", "secret", heard.append, proof)
    yield heard
    reader.close()
    listener.close()


async def test_the_reader_sends_the_secret() -> None:
    server = Server(HTTP + chunk(LINE))
    async with listening(server) as heard:
        await until(lambda: heard)
    head = server.asked[0].decode()
    assert head.startswith(f"GET {PATH} HTTP/1.1\r\n")
    assert f"{request_headers.SECRET}: secret\r\n" in head


async def test_lines_may_be_cut_anywhere() -> None:
    pieces = b"".join(chunk(piece) for piece in (LINE[:5], LINE[5:] + LINE + LINE[:9], LINE[9:-1], LINE[-1:]))
    async with listening(Server(HTTP + pieces, None)) as heard:
        await until(lambda: len(heard) == 3)
        assert heard == [LOAD] * 3


async def test_the_reader_reconnects_after_a_break() -> None:
    server = Server(
        HTTP + chunk(LINE), b"", b"nonsense\r\n\r\n", HTTP + chunk(b"[]\n"), HTTP + chunk(LINE), None
    )
    async with listening(server) as heard:
        await until(lambda: len(heard) == 2)
        assert len(server.asked) >= 5


async def test_a_stranger_that_has_the_port_by_now_is_not_believed() -> None:
    """A load with another worker's proof is ignored, too."""
    other, own = (HTTP[:-2] + f"{request_headers.PROOF}: {p}\r\n\r\n".encode() for p in ("other", "own"))
    idle = chunk(line_of(replace(LOAD, ongoing=0)))
    server = Server(HTTP + idle, other + idle, own + chunk(LINE), None)
    async with listening(server, "own") as heard:
        await until(lambda: heard)
        assert heard == [LOAD]


async def test_a_line_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_reader, "LONGEST_LINE_BYTES", 100)
    server = Server(HTTP + chunk(b"x" * 101), HTTP + chunk(LINE), None)
    async with listening(server) as heard:
        await until(lambda: heard)


async def test_a_silent_worker_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_reader, "STALE_S", 0.05)
    server = Server(None, HTTP + chunk(LINE), None)
    async with listening(server) as heard:
        await until(lambda: heard)
        assert len(server.asked) == 2


async def test_pauses_grow_where_there_is_no_load() -> None:
    server = Server(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
    async with listening(server) as heard:
        await until(lambda: len(server.at_s) == 6)
        pauses = [after - before for before, after in zip(server.at_s, server.at_s[1:], strict=False)]
        # A pause is 0.5 to 1 of its length, which doubles each time; a busy machine only makes it longer.
        assert all(pause >= 0.5 * 0.01 * 2**n for n, pause in enumerate(pauses))
        assert heard == []


async def test_a_closed_reader_hears_nothing() -> None:
    server = Server(HTTP + chunk(LINE), None)
    async with listening(server) as heard:
        await until(lambda: heard)
    before = len(heard)
    await asyncio.sleep(0.05)
    assert len(heard) == before


async def test_an_error_about_one_load_does_not_end_the_reader() -> None:
    server = Server(HTTP + chunk(LINE))
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    seen = []

    def fail(load: WorkerLoad) -> None:
        seen.append(load)
        raise ZeroDivisionError

    reader = LoadReader(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", "s", fail)
    await until(lambda: len(seen) == 2)
    reader.close()
    listener.close()


# --- the workers of a base -----------------------------------------------------------------------


@asynccontextmanager
async def client_of(*reports: WorkerReport) -> AsyncIterator[tuple[EngineClient, list[WorkerReport]]]:
    known = list(reports)

    async def find(base: str) -> list[WorkerReport]:
        return list(known)

    client = EngineClient(find, 100)
    yield client, known
    client.close()


def workers_of(client: EngineClient) -> BaseWorkers:
    return client._bases["b"]


def only(client: EngineClient) -> KnownWorker:
    (worker,) = workers_of(client).directory.known
    return worker


async def test_a_workers_load_is_known_soon_and_stays_young() -> None:
    worker = Worker(echo_config(), "127.0.0.1")
    await worker.start()
    await worker.open_door("127.0.0.1")
    try:
        async with client_of(await worker.report()) as (client, _):
            await client.call("b", ASK)
            await until(lambda: only(client).load)
            known = only(client)
            first_s = known.load_at_s
            await client.call("b", ASK)
            await until(lambda: known.load_at_s > first_s)
            assert known.load is not None
            assert known.load.ongoing == 0
    finally:
        await worker.close()


async def test_a_worker_that_left_is_not_listened_to() -> None:
    worker = Worker(echo_config(), "127.0.0.1")
    await worker.start()
    await worker.open_door("127.0.0.1")
    try:
        async with client_of(await worker.report()) as (client, known):
            await client.call("b", ASK)
            await until(lambda: only(client).load)
            gone = only(client)
            known.clear()
            await until(lambda: not workers_of(client).directory.known)
            feed = worker._door._feed if worker._door else None
            assert feed is not None
            await until(lambda: not feed._listeners)
            assert gone._reader is not None
            assert gone._reader._task.cancelled()
    finally:
        await worker.close()


async def test_an_older_worker_serves_without_telling() -> None:
    asked = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["method"])
        if scope["path"] == PATH:
            raise ZeroDivisionError  # as an application that reads no empty body
        await send(HEAD)
        await send(part(b"here", more=False))

    async with opened(app, tells=False) as door, client_of(report(door)) as (client, _):
        for _ in range(3):
            assert (await client.call("b", ASK)).body == b"here"
        await until(lambda: asked.count("GET") >= 2)
        assert (await client.call("b", ASK)).body == b"here"
        assert only(client).load is None
        assert time.monotonic() - only(client).load_at_s > STALE_S


def _has_reported(worker: KnownWorker, ongoing: int) -> bool:
    return worker.load is not None and worker.load.ongoing == ongoing


async def test_the_load_includes_requests_of_other_gateways() -> None:
    app = Held()
    async with (
        opened(app) as door,
        client_of(report(door)) as (one, _),
        client_of(report(door)) as (other, _),
    ):
        asking = [asyncio.create_task(client.call("b", ASK)) for client in (one, other, other)]
        await until(lambda: app.asked == 3)
        for known in map(only, (one, other)):
            await until(partial(_has_reported, known, 3))
        assert [only(client).outstanding for client in (one, other)] == [1, 2]
        app.may_answer.set()
        await asyncio.gather(*asking)
