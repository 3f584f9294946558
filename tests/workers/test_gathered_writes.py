"""Answers leave in one write, and what is streamed leaves piece by piece all the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from testkit.doors import HEAD, opened, part
from workers import request_headers
from workers.asgi import AsgiApp
from workers.server import gathered_writes
from workers.server.gathered_writes import GatheredWrites, GatheringProtocol

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Written(asyncio.Transport):
    """A connection that keeps what each write was given."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connected(app: AsgiApp) -> tuple[GatheringProtocol, Written]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", proxy_headers=False, interface="asgi3")
    config.load()
    state = ServerState()
    protocol = GatheringProtocol(config, state, {}, asyncio.get_running_loop())
    written = Written()
    protocol.connection_made(written)
    return protocol, written


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_whole_answer_is_one_write() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(HEAD)
        await send(part(b"one"))
        await send(part(b"two"))
        await send(part(b"", more=False))

    protocol, written = connected(app)
    for count in (1, 2):
        protocol.data_received(REQUEST)
        await turns()
        assert len(written.writes) == count
        head, _, body = written.writes[-1].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_answer_is_written_when_it_is_complete_not_a_turn_later() -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        seen.append(len(written.writes))
        await send(part(b"all", more=False))
        seen.append(len(written.writes))

    protocol, written = connected(app)
    protocol.data_received(REQUEST)
    await turns()
    assert seen == [0, 1]


async def test_pieces_of_different_turns_are_not_held_back() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"one"))
        await go_on.wait()
        await send(part(b"two"))
        await send(part(b"", more=False))

    protocol, written = connected(app)
    protocol.data_received(REQUEST)
    await turns()
    assert [w.rpartition(b"\r\n\r\n")[2] for w in written.writes] == [b"3\r\none\r\n"]
    go_on.set()
    await turns()
    assert written.writes[1:] == [b"3\r\ntwo\r\n0\r\n\r\n"]


async def test_much_is_not_gathered_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_writes, "LIMIT_BYTES", 100)
    written = Written()
    gathered = GatheredWrites(written, asyncio.get_running_loop())
    gathered.write(b"a" * 60)
    assert not written.writes
    gathered.write(b"b" * 60)
    gathered.write(b"c")
    assert written.writes == [b"a" * 60 + b"b" * 60]
    await turns()
    assert written.writes[1:] == [b"c"]


async def test_gathered_bytes_are_written_before_the_close() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"all", more=False))

    protocol, written = connected(app)
    protocol.data_received(REQUEST.replace(b"host: x", b"host: x\r\nconnection: close"))
    await turns()
    assert written.closed
    assert b"".join(written.writes).endswith(b"3\r\nall\r\n0\r\n\r\n")

    other = Written()
    gathered = GatheredWrites(other, asyncio.get_running_loop())
    gathered.write(b"last words")
    gathered.close()
    await turns()
    assert (other.writes, other.closed) == ([b"last words"], True)


async def test_a_reader_that_is_slow_holds_the_application_back() -> None:
    """On real sockets: an application that sends without an end must wait for its reader."""
    sent = 0
    piece = b"x" * 32_768

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send(HEAD)
        while True:
            await send(part(piece))
            sent += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(60), opened(app) as door:
        port = door.address.rpartition(":")[2]
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port), limit=1024)
        head = REQUEST.replace(b"host: x", f"{request_headers.SECRET}: {door.secret}".encode())
        writer.write(head)
        before = -1
        while sent != before:
            before = sent
            await turns(2000)
        assert sent > 0
        await reader.read(1)
        writer.transport.abort()
