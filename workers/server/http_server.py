"""A worker's HTTP server: plain HTTP/1.1 on its own port, for clients that know the worker's secret.

It passes scope, receive and send on unchanged, so a client that leaves appears as the application's own
disconnect message, as under any ASGI server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from workers import load_lines, request_headers
from workers.addresses import family_of, reached_at
from workers.asgi import AsgiApp, Message
from workers.server.gathered_writes import GatheringProtocol
from workers.server.load_feed import LoadFeed

log = logging.getLogger(__name__)

# The gateway closes idle connections; if the server did, it could close one just as a request is sent on it.
KEEP_ALIVE_S = 24 * 3600
# Longest wait for running requests when the worker stops; within Serve's graceful_shutdown_timeout_s.
DRAIN_S = 15.0
_SECRET = request_headers.SECRET.encode()


class Door:
    """The ASGI application behind the port: checks the secret, counts requests, and passes them on.

    Gateways that listen to `feed` are not requests: they are not counted, and end when the door is closed.
    """

    def __init__(self, app: AsgiApp, feed: LoadFeed | None = None) -> None:
        self.secret = secrets.token_hex(32)
        self.proof = secrets.token_hex(16)  # on every answer, also on those of the protocol itself
        self.address = ""
        self.running = 0
        self.closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._app = app
        self._feed = feed
        self._expected = self.secret.encode()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(_SECRET, b"")
        if not hmac.compare_digest(given, self._expected):
            await refuse(send, 401, "this port answers its gateway only")
        elif self.closing:
            await refuse(send, 503, "this worker is stopping")
        elif self._feed is not None and scope["path"] == load_lines.PATH and scope["method"] == "GET":
            await self._feed.answer(receive, send)
        else:
            self._count(1)
            try:
                await self._app(scope, receive, send)
            finally:
                self._count(-1)

    def _count(self, more: int) -> None:
        self.running += more
        if self.running:
            self._idle.clear()
        else:
            self._idle.set()
        if self._feed is not None:
            self._feed.count(self.running)

    async def open(self, host: str, node_ip: str) -> None:
        """Listen on a free port of `host`; `address` is then "ip:port" as other nodes reach it.

        Raises OSError if the server cannot listen on `host`.
        """
        listener = socket.create_server((host, 0), family=family_of(host), backlog=2048)
        self._server = _Server(_config(self))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.address = reached_at(host, listener.getsockname()[1], node_ip)

    def check(self) -> None:
        """Raises RuntimeError if the server was opened but no longer listens."""
        if self._serving is not None and self._serving.done() and not self.closing:
            raise RuntimeError("the worker's HTTP server ended")

    async def close(self) -> None:
        """Let running requests end (at most DRAIN_S), accept no new ones, and free the port."""
        self.closing, self.address = True, ""
        if self._feed is not None:
            self._feed.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), DRAIN_S)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving


class _DoorProtocol(GatheringProtocol):
    """A gateway reads as slowly as its client, whose speed it limits itself; this limit is for a gateway that
    hangs.
    """

    patience = 10


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: signals belong to Ray, whose process this is."""
        yield


def _config(app: Door) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        headers=[(request_headers.PROOF, app.proof)],
        http=_DoorProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


async def refuse(send: Any, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json"), (request_headers.REFUSED.encode(), b"1")]
    await respond(send, status, headers, json.dumps({"error": {"message": message}}).encode())


async def respond(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer by ASGI."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
