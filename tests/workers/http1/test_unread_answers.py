"""Clients that do not read what they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.doors import HEAD, part
from testkit.workers.http1_connections import listening
from workers.http1 import local_socket
from workers.http1.limits import Limits
from workers.http1.listener import Listener
from workers.http1.outgoing import Progress
from workers.http1.server_connection import Serving

ASKED = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PIECE = 10_000 * b"x"


class Streaming:
    """An application that sends for ever; `sent` pieces so far. `ended` when it saw its client leave."""

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


def asking(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(ASKED)
    return client


async def all_of(client: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        """The connection goes on."""


async def test_a_client_that_reads_nothing_is_reset() -> None:
    app = Streaming()
    async with listening(app, Limits(unread_s=0.3)) as port:
        with asking(port) as client:
            await app.ended.wait()
            assert app.sent * len(PIECE) < 2 << 20
            client.setblocking(False)
            with pytest.raises(ConnectionResetError):
                await all_of(client)


async def test_a_client_of_the_same_machine_that_reads_nothing_is_ended() -> None:
    app = Streaming()
    listener = Listener(Serving(app=app, limits=Limits(unread_s=0.3)))
    sock, name = local_socket.named()
    await listener.open(sock)
    with local_socket.connected(name) as client:
        client.sendall(ASKED)
        await app.ended.wait()
        assert app.sent * len(PIECE) < 2 << 20
        await all_of(client)
    await listener.close(grace_s=0.0)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200))
def test_a_client_is_reset_as_soon_as_nothing_left_for_so_long_and_never_sooner(sizes: list[int]) -> None:
    limit_s, pause_s = 15.0, 1.0
    progress = Progress(limit_s, 0.0)
    moved_s, least = 0.0, math.inf
    for count, size in enumerate(sizes, start=1):
        now_s = count * pause_s
        if size < least < math.inf:
            moved_s = now_s
        least = min(least, size)
        assert progress.left_s(size, now_s) == pytest.approx(max(0.0, moved_s + limit_s - now_s))


async def test_an_application_that_pauses_is_not_a_client_that_does() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"first"))
        await asyncio.sleep(0.5)
        await send(part(b"last", more=False))

    async with listening(app, Limits(unread_s=0.1)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED)
        await reader.readuntil(b"last")
        writer.close()


async def test_a_slow_client_holds_its_application_back() -> None:
    app = Streaming()
    async with listening(app) as port:
        with asking(port) as client:
            before = -1
            while app.sent != before:  # until nothing moves
                before = app.sent
                await asyncio.sleep(0.1)
            assert 0 < app.sent * len(PIECE) < 2 << 20
            client.setblocking(False)
            while app.sent < before + 100:
                assert await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await app.ended.wait()
        assert app.ended.is_set()
