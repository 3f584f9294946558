"""Clients that do not read, at a worker's door and at a server like Serve's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from testkit.doors import HEAD, part
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


async def test_a_client_that_reads_nothing_is_reset(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_limits, "WRITE_S", 0.3)
    app = Streaming()
    async with serving(app, protocol) as port:
        with asking(port) as client:
            await app.ended.wait()
            assert app.sent * len(PIECE) < 2 << 20
            client.setblocking(False)
            with pytest.raises(ConnectionResetError):
                await all_of(client)


class Clock:
    """A loop whose time moves on demand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, after_s: float, call: Any) -> Any:
        self.due.append((self.now_s + after_s, call))
        return SimpleNamespace(cancel=self.due.clear)

    def go_on(self) -> None:
        (self.now_s, call) = self.due.pop()
        call()


class Watched(BoundedHead):
    """`unsent` bytes are left of what was written."""

    def __init__(self, clock: Clock) -> None:
        self.loop, self.flow = clock, SimpleNamespace(pause_writing=int, resume_writing=int)  # type: ignore[assignment]
        self.unsent, self.reset_s = 0, math.inf

    def _unsent_bytes(self) -> int:
        return self.unsent

    def _reset(self) -> None:
        self.reset_s = self.loop.time()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200))
def test_a_client_that_reads_slowly_is_not_reset(sizes: list[int]) -> None:
    """The connection is reset as soon as the unread bytes did not shrink for the limit, and never sooner."""
    clock = Clock()
    watched = Watched(clock)
    watched.pause_writing()
    seen: list[tuple[float, int]] = []
    for size in sizes:
        watched.unsent = size
        clock.go_on()
        seen.append((clock.now_s, size))
        if not clock.due:
            break
    progress = [
        now_s for i, (now_s, size) in enumerate(seen) if i and size < min(before for _, before in seen[:i])
    ]
    last_s = progress[-1] if progress else 0.0
    is_over = clock.now_s - last_s >= write_limits.WRITE_S - 1e-9
    assert (watched.reset_s < math.inf) == is_over == (not clock.due)
    assert clock.now_s - last_s <= write_limits.WRITE_S + 1e-9


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
