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
from typing import Any

from workers import load_lines, request_headers
from workers.addresses import family_of, reached_at
from workers.asgi import AsgiApp, Message
from workers.http1 import local_socket
from workers.http1.limits import Limits
from workers.http1.listener import BACKLOG, Listener
from workers.http1.server_connection import Serving
from workers.server.load_feed import LoadFeed

log = logging.getLogger(__name__)

# The gateway closes idle connections: if the server did, it could close one just as a request is sent on it.
# A gateway reads as slowly as its client, whose speed it limits. `unread_s` is for a gateway that hangs.
LIMITS = Limits(idle_s=24 * 3600, unread_s=10 * Limits.unread_s)
# Longest wait for running requests when the worker stops; within Serve's graceful_shutdown_timeout_s.
DRAIN_S = 15.0
END_S = 1.0  # for requests that came meanwhile, and for tasks that were cancelled
_SECRET = request_headers.SECRET.encode()


class Door:
    """The ASGI application behind the port: checks the secret, counts requests, and passes them on.

    Gateways that listen to `feed` are not requests: they are not counted, and end when the door is closed.
    """

    def __init__(self, app: AsgiApp, feed: LoadFeed | None = None) -> None:
        self.secret = secrets.token_hex(32)
        self.proof = secrets.token_hex(16)  # on every answer, also on those of the protocol itself
        self.address = self.local_name = ""
        self.running = 0
        self.closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._app = app
        self._feed = feed
        self._expected = self.secret.encode()
        headers = [(request_headers.PROOF.encode(), self.proof.encode())]
        self._listener = Listener(Serving(app=self, limits=LIMITS, default_headers=lambda: headers))

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(_SECRET, b"")
        if not hmac.compare_digest(given, self._expected):
            await refuse(
                send, 401, "this port answers only Ostinato's gateways; send the request to the API's address"
            )
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
        """Listen on a free port of `host`, and at `local_name` for gateways of this machine.

        `address` is then "ip:port" as other nodes reach it.

        Raises OSError if the server cannot listen on `host`.
        """
        sock = socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)
        await self._listener.open(sock)
        self.address = reached_at(host, sock.getsockname()[1], node_ip)
        try:
            local, self.local_name = local_socket.named()
        except OSError as e:
            log.info("gateways of this machine use TCP: no Unix socket could be made: %s", e)
        else:
            await self._listener.open(local)

    def check(self) -> None:
        """Raises RuntimeError if the server was opened but no longer listens."""
        if self.address and not self._listener.is_open:
            raise RuntimeError("the worker's HTTP server ended")

    async def close(self) -> None:
        """Let running requests end (at most DRAIN_S), accept no new ones, and free the port."""
        self.closing, self.address, self.local_name = True, "", ""
        if self._feed is not None:
            self._feed.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), DRAIN_S)
        await self._listener.close(END_S)


async def refuse(send: Any, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json"), (request_headers.REFUSED.encode(), b"1")]
    await respond(send, status, headers, json.dumps({"error": {"message": message}}).encode())


async def respond(send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Send a whole answer by ASGI."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
