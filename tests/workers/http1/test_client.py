"""The client, against a worker's server and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from testkit.doors import HEAD, Held, opened, part
from workers import request_headers
from workers.http1 import client
from workers.http1.client import BrokenOff, Connection, NotConnected, Pool
from workers.server.http_server import Door

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
async def _soon() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


@asynccontextmanager
async def misbehaving(serve: Serve) -> AsyncIterator[Pool]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield pool
    pool.close()
    server.close()


PoolTo = Callable[[Door], Pool]


@pytest.fixture(params=["by TCP", "by its name"])
def pool_to(request: pytest.FixtureRequest) -> PoolTo:
    """Connections to a server of this machine."""
    is_local = request.param == "by its name"
    return lambda door: Pool(door.address, door.local_name if is_local else "")


async def ask(door: Door, connection: Connection, body: bytes = b"") -> Connection:
    await connection.ask("/", {"host": "x", **request_headers.request_headers(door.secret, None)}, body)
    return connection


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    more = True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send(HEAD)
    await send(part(body, more=False))


async def _exchange(connection: Connection) -> bytes:
    await connection.ask("/", {"host": "x"}, b"")
    return await connection.read()


async def _ended(connection: Connection) -> None:
    while connection.reusable:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_connections_are_kept_and_used_again(pool_to: PoolTo) -> None:
    async with opened(echo) as door:
        pool = pool_to(door)
        first = await ask(door, await pool.take(), b"one")
        assert (first.status, first.headers[b"content-type"]) == (200, b"text/event-stream")
        assert await first.read() == b"one"
        pool.give_back(first)
        again = await pool.take()
        assert again is first
        assert await (await ask(door, again, b"two")).read() == b"two"
        assert await pool.take() is not again  # which is in use


async def test_pieces_are_what_the_application_sent(pool_to: PoolTo) -> None:
    sent = [b"data: %d\n\n" % i for i in range(50)] + [b"x" * 300_000, b"end"]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        for piece in sent:
            await send(part(piece))
        await send(part(b"", more=False))

    async with opened(app) as door:
        connection = await ask(door, await pool_to(door).take())
        got = []
        while (piece := await connection.piece()) is not None:
            got.append(piece)
        assert got == sent
        assert connection.reusable


async def test_a_large_body_arrives_whole(pool_to: PoolTo) -> None:
    body = bytes(range(256)) * 16384
    async with opened(echo) as door:
        connection = await ask(door, await pool_to(door).take(), body)
        assert await connection.read() == body


async def test_a_slow_reader_holds_the_sender_up(monkeypatch: pytest.MonkeyPatch, pool_to: PoolTo) -> None:
    monkeypatch.setattr(client, "BUFFER_BYTES", 1000)
    total, sent = 200, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send(HEAD)
        for _ in range(total):
            await send(part(b"y" * 100_000))
            sent += 1
        await send(part(b"", more=False))

    async with opened(app) as door:
        connection = await ask(door, await pool_to(door).take())
        seen = -1
        while seen != sent:  # until nothing moves any more
            seen = sent
            await asyncio.sleep(0.2)
        assert sent < total
        assert len(await connection.read()) == total * 100_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_slow_reader_holds_up_who_sends_all_at_once(chunked: bool) -> None:
    """Whole, by a content-length, or as one chunk: it counts as it comes."""
    size, written = 64 << 20, 0
    kind = "transfer-encoding: chunked" if chunked else f"content-length: {size}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())
        writer.write(b"%x\r\n" % size if chunked else b"")
        while written < size:
            writer.write(b"z" * (1 << 16))
            await writer.drain()
            written += 1 << 16
        writer.write(b"\r\n0\r\n\r\n" if chunked else b"")

    async with misbehaving(serve) as pool:
        connection = await pool.take()
        await connection.ask("/", {"host": "x"}, b"")
        seen = -1
        while seen != written or not written:  # until nothing moves any more
            seen = written
            await asyncio.sleep(0.2)
        assert connection._buffered + connection._part_bytes <= 2 << 20
        assert written < size
        assert await connection.read() == b"z" * size


async def test_leaving_is_seen_on_the_other_side(pool_to: PoolTo) -> None:
    app = Held(streams=True)
    async with opened(app) as door:
        pool = pool_to(door)
        connection = await ask(door, await pool.take())
        assert await connection.piece() == b"data: 1\n\n"
        pool.give_back(connection)  # before its end
        await app.left.wait()


async def test_a_port_without_a_listener_is_not_connected() -> None:
    async with opened(echo) as door:
        address = door.address
    with pytest.raises(NotConnected):
        await Pool(address).take()


async def test_a_kept_connection_that_was_closed_is_not_used() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await closed.wait()
        writer.close()

    async with misbehaving(serve) as pool:
        stale = await pool.take()
        assert await _exchange(stale) == b"ok"
        pool.give_back(stale)
        closed.set()
        await _ended(stale)
        assert await pool.take() is not stale


async def test_connections_idle_for_long_are_ended(monkeypatch: pytest.MonkeyPatch, pool_to: PoolTo) -> None:
    async with opened(echo) as door:
        pool = pool_to(door)
        both = [await ask(door, await pool.take()) for _ in range(2)]
        for connection in both:
            await connection.read()
        pool.give_back(both[0])
        both[0].idle_since_s -= 10
        monkeypatch.setattr(client, "IDLE_S", 5.0)
        pool.give_back(both[1])
        assert not both[0].reusable
        assert await pool.take() is both[1]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfour",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"SSH-2.0-OpenSSH\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "no last chunk", "no HTTP"],
)
async def test_an_incomplete_answer_is_broken_off(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with misbehaving(serve) as pool:
        connection = await pool.take()
        with pytest.raises(BrokenOff):
            await _exchange(connection)
        assert not connection.reusable


async def test_an_unrequested_answer_ends_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async with misbehaving(serve) as pool:
        connection = await pool.take()
        await _ended(connection)


async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The first request gets a stream in one piece; later requests get a whole answer."""
    await reader.readuntil(b"\r\n\r\n")
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(text), text) for text in (b"data: error\n\n", b"data: [DONE]\n\n", b"")
    )
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    while not reader.at_eof():
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole")
    writer.close()


@pytest.mark.parametrize("read", [0, 1, 2])
async def test_no_request_reads_the_rest_of_another_answer(read: int) -> None:
    """A client that leaves a stream early, though all of it has come, leaves a connection that is not used
    again."""
    async with misbehaving(events) as pool:
        first = await pool.take()
        await first.ask("/", {"host": "x"}, b"")
        while len(first._pieces) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(read):
            assert await first.piece() is not None
        pool.give_back(first)
        second = await pool.take()
        assert (second is first) is (read == 2), "what is read to the end is kept"
        if second is not first:  # its server answers the first request with a stream
            assert await _exchange(second) == b"data: error\n\ndata: [DONE]\n\n"
        assert await _exchange(second) == b"whole"


async def test_an_unread_whole_answer_ends_its_connection(pool_to: PoolTo) -> None:
    async with opened(echo) as door:
        pool = pool_to(door)
        first = await ask(door, await pool.take(), b"one")
        while not first._complete:  # noqa: ASYNC110
            await asyncio.sleep(0)
        pool.give_back(first)
        second = await pool.take()
        assert second is not first
        assert await (await ask(door, second, b"two")).read() == b"two"


async def test_a_connection_that_returns_to_a_closed_pool_ends(pool_to: PoolTo) -> None:
    async with opened(echo) as door:
        pool = pool_to(door)
        connection = await ask(door, await pool.take(), b"one")
        await connection.read()
        pool.close()
        pool.give_back(connection)
        assert not connection.reusable


async def test_two_answers_to_one_request_end_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(2 * b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole")

    async with misbehaving(serve) as pool:
        connection = await pool.take()
        with contextlib.suppress(BrokenOff):
            assert await _exchange(connection) == b"whole"
        assert not connection.reusable
