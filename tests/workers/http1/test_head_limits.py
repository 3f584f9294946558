"""Heads that are too large or too slow, and connections without a request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.api.early_refusal import EarlyRefusal
from controlplane.runtime.replica_http import connections_of
from controlplane.settings import Settings
from controlplane.traffic.tenants import ONE_TENANT
from testkit.engine_configs import echo_config
from testkit.workers.http1_connections import (
    HandMovedLoop,
    by_uvicorn,
    connected,
    part,
    start,
    turns,
)
from workers.http1.limits import Limits
from workers.server.worker import Worker

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
LIMITS = Limits(head_bytes=64 << 10, head_s=8.0, idle_s=60.0)


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send(start((b"content-length", b"2")))
    await send(part(b"hi"))


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


# --- on real sockets: a worker's server, and a gateway's -------------------------------------------


@pytest.fixture(params=["worker", "gateway"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    if request.param == "worker":
        worker = Worker(echo_config(), "127.0.0.1")
        await worker.start()
        await worker.open_door("127.0.0.1")
        yield int((await worker.report()).address.rpartition(":")[2])
        await worker.close()
        return
    early = EarlyRefusal(Settings(), lambda: ONE_TENANT, lambda name, count: None)
    async with by_uvicorn(hello, connections_of(early)) as port:
        yield port


async def taken(port: int, beginning: bytes) -> int:
    """How many bytes after the beginning are read before the connection ends; at most 64 MiB are sent."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        writer.write(beginning)
        while sent < 64 << 20:
            writer.write(b"a" * 65536)
            sent += 65536
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return sent


async def test_a_head_without_an_end_is_cut(port: int) -> None:
    assert await taken(port, GET + b"x-long: ") < 32 << 20  # sockets' buffers hold some


async def test_trailers_without_an_end_are_cut(port: int) -> None:
    assert await taken(port, CHUNKED + b"\r\n1\r\na\r\n0\r\nx-long: ") < 32 << 20


async def test_a_long_body_is_not_a_head(port: int) -> None:
    """The server reads it to its end, whatever was answered before: the next request gets its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED + b"\r\n")
    for _ in range(20):
        writer.write(b"10000\r\n%b\r\n" % (b"a" * 65536))
        await writer.drain()
    writer.write(b"0\r\n\r\n" + GET + b"\r\n")
    for _ in range(2):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 "))
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        await reader.readexactly(int(length[1]))
    writer.close()


async def test_a_head_of_many_pieces_is_read(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in GET + b"x-a: b\r\nconnection: close\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await reader.read()).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 "))
    writer.close()


async def test_a_client_that_waits_is_told_that_its_head_is_too_large(port: int) -> None:
    head = GET + b"x: " + b"a" * (LIMITS.head_bytes - len(GET) - 3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"a")
    found = await reader.read()
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in found
    writer.close()


# --- in memory: the bound itself, and times --------------------------------------------------------


async def test_the_largest_head_is_read() -> None:
    head = GET + b"x: " + b"a" * (LIMITS.head_bytes - len(GET) - 3)
    connection, wire = connected(hello, LIMITS)
    connection.data_received(head)
    await turns()
    assert not wire.is_closing()
    connection.data_received(b"a")
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("begun", [b"G", GET, GET + b"x-a"])
async def test_a_head_that_does_not_end_in_time_is_told(begun: bytes) -> None:
    loop = HandMovedLoop()
    connection, wire = connected(hello, LIMITS, loop)
    loop.move(105.0)
    connection.data_received(begun)
    loop.move(107.9)
    assert not wire.is_closing()
    loop.move(108.1)  # 8 s after the connection began
    assert wire.written.startswith(b"HTTP/1.1 408 ")
    assert wire.closed
    assert not loop.timers


async def test_a_client_that_sends_nothing_is_not_told_anything() -> None:
    loop = HandMovedLoop()
    _, wire = connected(hello, LIMITS, loop)
    loop.move(108.1)
    assert (wire.written, wire.closed) == (b"", True)


async def test_each_head_has_its_time() -> None:
    """A later head begins with its first byte; bytes that belong to no head do not count."""
    loop = HandMovedLoop()
    connection, wire = connected(hello, LIMITS, loop)
    for _ in range(3):
        connection.data_received(GET + b"\r\n")
        await turns()
        loop.move(loop.now_s + 40.0)
        assert not wire.is_closing()
    wire.writes.clear()
    connection.data_received(b"\r\n")
    loop.move(loop.now_s + 10.0)
    assert not wire.is_closing()
    connection.data_received(GET)
    loop.move(loop.now_s + 7.9)
    assert not wire.is_closing()
    loop.move(loop.now_s + 0.2)
    assert wire.written.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"\r\n\r\n"])
async def test_an_idle_connection_is_closed_whatever_is_no_request(sent: bytes) -> None:
    loop = HandMovedLoop()
    connection, wire = connected(hello, LIMITS, loop)
    connection.data_received(GET + b"\r\n")  # answered at 100 s
    await turns()
    wire.writes.clear()
    for now_s in range(110, 160, 10):
        loop.move(now_s)
        connection.data_received(sent)
    loop.move(159.9)
    assert not wire.is_closing()
    assert len(loop.timers) == 1
    loop.move(160.1)
    assert (wire.written, wire.closed, loop.timers) == (b"", True, [])


async def test_a_body_that_does_not_end_after_its_answer_is_an_idle_connection() -> None:
    loop = HandMovedLoop()
    connection, wire = connected(hello, LIMITS, loop)
    connection.data_received(CHUNKED + b"\r\n1\r\na\r\n")  # answered at once
    await turns()
    for now_s in range(110, 160, 10):
        loop.move(now_s)
        connection.data_received(b"1\r\na\r\n")
    assert not wire.is_closing()
    loop.move(160.1)
    assert wire.closed


async def test_while_a_request_is_answered_no_time_runs() -> None:
    """Then a head that came meanwhile has its time, and nothing is written into the answer."""
    goes_on = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"4")))
        await send(part(b"ab", more=True))
        await goes_on.wait()
        await send(part(b"cd"))

    loop = HandMovedLoop()
    connection, wire = connected(slow, LIMITS, loop)
    connection.data_received(GET + b"\r\n" + GET)
    await turns()
    loop.move(1000.0)
    assert wire.written.endswith(b"\r\n\r\nab")
    goes_on.set()
    await turns()
    assert wire.written.endswith(b"\r\n\r\nabcd")
    wire.writes.clear()
    loop.move(1007.9)
    assert not wire.is_closing()
    loop.move(1008.1)
    assert wire.written.startswith(b"HTTP/1.1 408 ")


async def test_a_lost_connection_has_no_timer() -> None:
    loop = HandMovedLoop()
    connection, _ = connected(hello, LIMITS, loop)
    connection.data_received(GET + b"\r\n")
    await turns()
    assert len(loop.timers) == 1
    connection.connection_lost(ConnectionResetError())
    assert not loop.timers
