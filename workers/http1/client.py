"""A small HTTP/1.1 client for the hop from gateway to worker: POST and GET, connections that are kept open,
answers in pieces.

Both ends of that hop are ours. A general client (aiohttp: 0.2 ms of CPU per request against 0.04) would be
the largest part of a request's cost in the gateway.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import cast

import httptools

from workers.http1 import local_socket

CONNECT_TIMEOUT_S = 2.0
# Below the workers' own limit, so that always this side ends an idle connection.
IDLE_S = 300.0
# Reading from a connection pauses while this many bytes wait for a slow reader.
BUFFER_BYTES = 16 * 1024
READ_BYTES = 16 * 1024  # at once
# Larger data comes in several pieces, each of which counts as buffered: without chunks, and with chunks.
PART_BYTES, CHUNK_BYTES = 64 * 1024, 1024 * 1024
# Connections to a node that vanishes without notice break after about half a minute.
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


class NotConnected(Exception):
    """No connection was made: no process has seen the request."""


class Moved(Exception):
    """The request must go to another worker: this worker has sent no part of an answer."""


class BrokenOff(Exception):
    """The connection ended, or its data was not HTTP, before the answer was complete."""


def head_of(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request, without its content-length."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, ""]).encode("ascii")


class Connection(asyncio.BufferedProtocol):
    """One connection, which carries one request at a time: `ask`, then `piece` until None or `read`.

    Received data is put into `room` and parsed at once, so all connections of a loop may share it.
    """

    def __init__(self, room: memoryview) -> None:
        self._room = room
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.idle_since_s = 0.0
        self.has_begun = False  # a part of the answer's body came
        self.may_move = False  # set by the caller
        self._lost = False
        self._complete = self._stays = True
        self._paused = False
        self._parts: list[bytes] = []
        self._part_bytes, self._most_bytes = 0, PART_BYTES
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since_s = 0.0
        self._error: Exception | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def ask(
        self, path: str, headers: Mapping[str, str], body: bytes = b"", method: str = "POST"
    ) -> None:
        """Send a request, and wait for the head: `status` and `headers`. Raises BrokenOff."""
        await self.ask_with(head_of(method, path, headers), body)

    async def ask_with(self, head: bytes, body: bytes) -> None:
        """As `ask`, with a head that was made before (`head_of`)."""
        self.status, self.headers, self._complete, self.has_begun = 0, {}, False, False
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        while not self.status:
            await self._more()

    @property
    def reusable(self) -> bool:
        """Whether the last answer was read to its end, so that nothing of it is left for the next one."""
        return self._stays and self._complete and not self._lost and not self._pieces

    async def piece(self) -> bytes | None:
        """The next HTTP chunk as it was sent, or a part of a body without chunks. Raises BrokenOff."""
        while not self._pieces:
            if self._complete:
                return None
            await self._more()
        piece = self._pieces.popleft()
        self._buffered -= len(piece)
        if self._paused and self._buffered < BUFFER_BYTES:
            self._paused = False
            self._transport.resume_reading()
        return piece

    async def read(self) -> bytes:
        """The rest of the body. Raises BrokenOff."""
        if self._complete and len(self._pieces) == 1 and not self._paused:  # the usual case
            self._buffered = 0
            return self._pieces.popleft()
        pieces = []
        while (piece := await self.piece()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        if self._lost:
            raise BrokenOff("the connection was closed before the end of the answer")
        loop = asyncio.get_running_loop()
        self._waiter, self._waits_since_s = loop.create_future(), loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def waits_since_s(self, now_s: float) -> float:
        """Since when a reader waits for the other side; now, if no reader does."""
        return now_s if self._waiter is None or self._waiter.done() else self._waits_since_s

    def end(self, error: Exception) -> None:
        """End the connection; a reader that waits for more of the answer gets this error."""
        self._error = error
        self.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """End the connection; the other side sees that its client has left."""
        self._stays = False
        self._transport.abort()

    # --- what asyncio calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            for option in _SOCKET_OPTIONS:
                sock.setsockopt(*option)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._complete:
                raise httptools.HttpParserError("an answer without a request")
            self._parser.feed_data(self._room[:nbytes])
        except httptools.HttpParserError:
            self._lost = True
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._wake()

    # --- what httptools calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise BrokenOff("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        chunked = b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
        self._most_bytes = CHUNK_BYTES if chunked else PART_BYTES

    def on_body(self, data: bytes) -> None:
        self.has_begun = True
        self._parts.append(data)
        self._part_bytes += len(data)
        if self._part_bytes >= self._most_bytes:
            self.on_chunk_complete()

    def on_chunk_complete(self) -> None:
        if not self._parts:
            return
        piece = b"".join(self._parts)
        self._parts.clear()
        self._part_bytes = 0
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._buffered >= BUFFER_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.on_chunk_complete()
        self._complete = True
        self._stays = self._stays and self._parser.should_keep_alive()


class Pool:
    """The connections to one "host:port": as many as requests run at once, kept for the next ones."""

    def __init__(self, address: str, local_name: str = "") -> None:
        """`local_name`: the same server's name on its own machine (`local_socket`); empty: none."""
        host, _, port = address.rpartition(":")
        self._local_name = local_name
        self._host, self._port = host.strip("[]"), int(port)
        self._idle: deque[Connection] = deque()
        self._room = memoryview(bytearray(READ_BYTES))
        self._closed = False

    async def take(self) -> Connection:
        """An unused connection. Raises NotConnected."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await self._connected()
        except OSError as e:  # includes TimeoutError
            raise NotConnected(f"{self._host}:{self._port}: {e}") from e

    async def _connected(self) -> Connection:
        """A new connection. Raises OSError."""
        loop, make = asyncio.get_running_loop(), partial(Connection, self._room)
        if self._local_name:
            try:
                sock = local_socket.connected(self._local_name)
            except OSError:  # the server is on another machine, or has ended
                self._local_name = ""
            else:
                return (await loop.create_unix_connection(make, sock=sock))[1]
        return (await loop.create_connection(make, self._host, self._port))[1]

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end; close any other."""
        if self._closed or not connection.reusable:
            connection.abort()
            return
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)
        while self._idle[0].idle_since_s < connection.idle_since_s - IDLE_S:  # the oldest is first
            self._idle.popleft().abort()

    def close(self) -> None:
        """Close unused connections now, and the others when they are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()
