"""Requests' heads that are too large or too slow, at a worker's server and at one like a gateway's."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from testkit.engine_configs import echo_config
from workers.server import head_limits
from workers.server.gathered_writes import GatheringProtocol
from workers.server.head_limits import MAX_HEAD_BYTES, BoundedHead
from workers.server.worker import Worker

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


async def _hello(scope: object, receive: object, send: object) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"hi"})  # type: ignore[operator]


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is never sent; what is sent has all the time it needs on a busy machine."""
    monkeypatch.setattr(head_limits, "HEAD_S", 0.3)


@pytest.fixture(params=["door", "gateway"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    if request.param == "door":
        worker = Worker(echo_config(), "127.0.0.1")
        await worker.start()
        await worker.open_door("127.0.0.1")
        yield int((await worker.report()).address.rpartition(":")[2])
        await worker.close()
        return
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(_hello, http=GatheringProtocol, interface="asgi3", lifespan="off", log_config=None)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving


async def answer_to(port: int, *pieces: bytes) -> bytes:
    """The answer until the server closes the connection."""
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


async def taken(port: int, beginning: bytes) -> int:
    """The number of bytes that the server takes before it cuts the connection; at most 64 MiB are sent."""
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


async def test_a_head_without_end_is_cut(port: int) -> None:
    assert await taken(port, GET + b"x-long: ") < 32 << 20  # sockets' buffers hold some


async def test_a_refused_head_gets_the_reason(port: int) -> None:
    """A head that is just too long, whose client waits for an answer: all that was sent is read."""
    head = GET + b"x: " + b"a" * (MAX_HEAD_BYTES - len(GET) - 3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    await writer.drain()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.read()
    writer.write(b"a")
    found = await reader.read()
    assert found.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in found
    writer.close()


async def test_trailers_without_end_are_cut(port: int) -> None:
    """Bytes after a chunked body are no head, and are answered already."""
    assert await taken(port, CHUNKED + b"\r\n1\r\na\r\n0\r\nx-long: ") < 32 << 20


async def test_a_long_body_is_no_head(port: int) -> None:
    """It is read to its end, whatever was answered before: the next request finds its answer."""
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


@pytest.mark.parametrize("begun", [b"G", GET, GET + b"x-a"])
async def test_a_head_that_does_not_end_in_time_gets_an_error(
    impatient: None, port: int, begun: bytes
) -> None:
    assert (await answer_to(port, begun)).startswith(b"HTTP/1.1 408 ")


async def test_a_silent_client_is_not_awaited(impatient: None, port: int) -> None:
    assert await answer_to(port) == b""


async def test_a_used_connection_has_the_same_limit(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for impatient in (False, False, True):
        if impatient:
            monkeypatch.setattr(head_limits, "HEAD_S", 0.3)
        writer.write(GET + (b"" if impatient else b"\r\n"))
        if not impatient:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            assert length is not None
            await reader.readexactly(int(length[1]))
    assert (await reader.read())[:13] in (b"HTTP/1.1 408 ", b"")
    writer.close()


async def test_nothing_is_written_into_an_answer_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request is half there while the first is answered."""
    goes_on = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"cd"})

    monkeypatch.setattr(head_limits, "HEAD_S", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(slow, http=BoundedHead, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
    writer.write(GET + b"\r\n" + GET)
    await reader.readuntil(b"ab")
    await asyncio.sleep(0.5)  # the second head is late five times
    goes_on.set()
    assert await reader.readexactly(2) == b"cd"
    assert (await reader.read())[:13] in (b"HTTP/1.1 408 ", b"")
    writer.close()
    server.should_exit = True
    await serving


async def test_a_head_of_many_pieces_is_read(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for byte in GET + b"x-a: b\r\nconnection: close\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await reader.read()).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 "))
    writer.close()
