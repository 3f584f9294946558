"""Servers of `workers.http1` for tests: on real sockets, and in memory with a clock moved by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from workers.asgi import AsgiApp
from workers.http1.limits import Limits
from workers.http1.listener import Listener
from workers.http1.server_connection import ServerConnection, Serving


@asynccontextmanager
async def listening(app: AsgiApp, limits: Limits | None = None) -> AsyncIterator[int]:
    """The port of a server before this application."""
    listener, sock = (
        Listener(Serving(app=app, limits=limits or Limits())),
        socket.create_server(("127.0.0.1", 0)),
    )
    await listener.open(sock)
    try:
        yield sock.getsockname()[1]
    finally:
        await listener.close(grace_s=0.0)


@asynccontextmanager
async def by_uvicorn(app: AsgiApp, http: Any = "httptools", **settings: Any) -> AsyncIterator[int]:
    """The port of uvicorn before this application."""
    sock = socket.create_server(("127.0.0.1", 0))
    quiet = {"log_config": None, "date_header": False, "server_header": False, "proxy_headers": False}
    config = uvicorn.Config(app, http=http, interface="asgi3", lifespan="off", **{**quiet, **settings})
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await running


class Wire(asyncio.Transport):
    """A transport that keeps what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.reading = True

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class HandMovedLoop:
    """The running loop, with a time and timers of its own, which `move` moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        self.create_task, self.call_soon = loop.create_task, loop.call_soon

    def time(self) -> float:
        return self.now_s

    def call_later(self, after_s: float, call: Callable[[], None]) -> Any:
        return self.call_at(self.now_s + after_s, call)

    def call_at(self, due_s: float, call: Callable[[], None]) -> Any:
        timer = (due_s, call)
        self.timers.append(timer)

        class Handle:
            def cancel(handle) -> None:  # noqa: N805
                if timer in self.timers:
                    self.timers.remove(timer)

        return Handle()

    def move(self, to_s: float) -> None:
        """Call each timer at its time, until this time."""
        while due := [timer for timer in self.timers if timer[0] <= to_s]:
            timer = min(due, key=lambda timer: timer[0])
            self.timers.remove(timer)
            self.now_s = timer[0]
            timer[1]()
        self.now_s = to_s


def connected(
    app: AsgiApp, limits: Limits | None = None, loop: Any = None, headers: Any = ()
) -> tuple[ServerConnection, Wire]:
    """A connection whose other side is a `Wire`."""
    serving = Serving(app=app, limits=limits or Limits(), default_headers=lambda: headers)
    connection, wire = ServerConnection(serving, loop or asyncio.get_running_loop()), Wire()
    connection.connection_made(wire)
    return connection, wire


async def turns(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await send(start((b"content-length", b"%d" % len(body))))
    await send(part(body))
