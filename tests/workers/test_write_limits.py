"""Clients that do not read, at a worker's door and at a server like Serve's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from doors import HEAD, part

from workers.server import write_limits
from workers.server.gathered_writes import GatheringProtocol
from workers.server.head_limits import BoundedHead

ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PIECE = 10_000 * b"x"


class Streaming:
    """An application that sends for ever; `sent` pieces so far. `ended` when its client was seen to leave."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.create_task(self._gone(receive))
        await send(HEAD)
        while not gone.done():
            await send(part(PIECE))
            self.sent += 1
            await asyncio.sleep(0)
        self.ended.set()

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(90):
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, protocol: Any) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, lifespan="off", log_config=None))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await running


@pytest.fixture(params=[BoundedHead, GatheringProtocol], ids=["proxy", "door"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


def asking(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(ASKED)
    return client


async def all_of(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        """It was reset, and not ended."""


async def test_one_that_reads_nothing_is_reset(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_limits, "WRITE_S", 0.3)
    app = Streaming()
    async with serving(app, protocol) as port:
        with asking(port) as client:
            await app.ended.wait()
            assert app.sent * len(PIECE) < 2 << 20
            client.setblocking(False)
            with pytest.raises(ConnectionResetError):
                await all_of(client)


async def test_one_that_reads_slowly_is_not(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some in each of the times that it has; it takes much longer than that in all."""
    monkeypatch.setattr(write_limits, "WRITE_S", 2.0)
    app, loop = Streaming(), asyncio.get_running_loop()
    async with serving(app, protocol) as port:
        with asking(port) as client:
            client.setblocking(False)
            until_s = loop.time() + 5.0
            while loop.time() < until_s:
                assert await loop.sock_recv(client, 65536)
                await asyncio.sleep(0.05)
            assert not app.ended.is_set()


async def test_an_engine_that_pauses_is_no_client_that_does(
    protocol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_limits, "WRITE_S", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"first"))
        await asyncio.sleep(1.0)
        await send(part(b"last", more=False))

    async with serving(app, protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED)
        await reader.readuntil(b"last")
        writer.close()
