"""Requests' heads that are too large or too slow, at a worker's door and at a server like Serve's proxy."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from engine_configs import echo_config
from uvicorn.protocols.http import auto

from workers.server import head_limits
from workers.server.head_limits import MAX_HEAD_BYTES, bound_every_head
from workers.server.worker import Worker

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def _hello(scope: object, receive: object, send: object) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"hi"})  # type: ignore[operator]


@pytest.fixture(autouse=True)
async def _quick(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(head_limits, "HEAD_S", 0.3)
    async with asyncio.timeout(60):
        yield


@pytest.fixture(params=["door", "proxy"])
async def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    if request.param == "door":
        worker = Worker(echo_config(), "127.0.0.1")
        await worker.start()
        await worker.open_door("127.0.0.1")
        yield int((await worker.report()).address.rpartition(":")[2])
        await worker.close()
        return
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # put back afterwards
    assert bound_every_head() == []
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(lambda: _hello, factory=True, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def told(port: int, *pieces: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return await reader.read()
    except ConnectionError:  # it was closed while we still wrote
        return b""
    finally:
        writer.close()


async def test_a_head_without_end_is_cut(port: int) -> None:
    sent = 0
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(GET + b"x-long: ")
        while sent < 64 << 20:
            writer.write(b"a" * 65536)
            sent += 65536
            await writer.drain()
    except ConnectionError:
        pass
    else:
        pytest.fail("64 MiB of a head were taken")
    finally:
        writer.close()
    assert sent < 32 << 20  # sockets' buffers hold some


async def test_it_is_told_why(port: int) -> None:
    """Of one that is a little too long, and waits for an answer."""
    head = GET + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 90) for i in range(MAX_HEAD_BYTES // 100 + 40))
    found = await told(port, head[:1000], head[1000:])
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in found


@pytest.mark.parametrize("begun", [b"G", GET, GET + b"x-a"])
async def test_one_that_does_not_end_in_time_is_told(port: int, begun: bytes) -> None:
    assert (await told(port, begun)).startswith(b"HTTP/1.1 408 ")


async def test_who_says_nothing_is_not_waited_for(port: int) -> None:
    assert await told(port) == b""


async def test_so_it_is_on_a_connection_that_was_used(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(GET + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        await reader.readexactly(int(length[1]))
    writer.write(GET)
    assert (await reader.read())[:13] in (b"HTTP/1.1 408 ", b"")
    writer.close()


async def test_a_head_of_many_pieces_is_read(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in GET + b"x-a: b\r\nconnection: close\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await reader.read()).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 "))
    writer.close()
