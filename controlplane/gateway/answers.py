"""An engine's answer as it comes: its first token, how many tokens it has, and whether it is in time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from controlplane.gateway.http1 import Connection
from controlplane.gateway.turnstile import late
from controlplane.traffic.host_router import Asked
from workers import request_headers

T = TypeVar("T")

_FAULT = request_headers.FAULT.encode()
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
# Of a stream's events one says that it begins or why it ends, and one that it has ended.
_OTHER_EVENTS = 2
_TAIL_BYTES = 4096


class Answer:
    """`on_first` is called once, with the first piece of a stream or a whole answer. `tokens` is known when
    all was read.

    What comes too late for a request that is to be dropped then raises Late: the first piece of a stream
    after `Asked.first_by_s`, anything after `Asked.whole_by_s`.
    """

    def __init__(self, host: str, asked: Asked, connection: Connection, on_first: Callable[[], None]) -> None:
        self._host = host
        self._asked = asked
        self._connection = connection
        self._on_first = on_first
        self._events = 0
        self._last = self._before_last = b""
        self.status = connection.status
        self.content_type = connection.headers.get(b"content-type", b"application/json").decode("latin-1")
        self.fault = connection.headers.get(_FAULT, b"")
        self.tokens: int | None = None

    async def read(self) -> bytes:
        """All of it. Raises BrokenOff, Late."""
        limit_s, reading = self._asked.whole_by_s, self._connection.read()
        body = await (reading if limit_s is None else in_time(self._host, self._asked, limit_s, reading))
        self._count(body[-_TAIL_BYTES:], 0)
        self._on_first()
        return body

    async def piece(self) -> bytes | None:
        """The next piece of a stream. Raises BrokenOff, Late."""
        limit_s = self._asked.whole_by_s if self._events else self._asked.first_by_s
        piece = await in_time(self._host, self._asked, limit_s, self._connection.piece())
        if piece is None:
            self._count(self._before_last + self._last, self._events - _OTHER_EVENTS)
            return None
        if not self._events:
            self._on_first()
        self._events += max(1, piece.count(b"\n\n"))
        self._before_last, self._last = self._last, piece
        return piece

    def _count(self, end: bytes, seen: int) -> None:
        """By what the engine says at the end, or by what was seen."""
        if self.status < 300:
            said = _USAGE.findall(end)
            self.tokens = int(said[-1]) if said else seen if seen > 0 else None


async def in_time(host: str, asked: Asked, limit_s: float | None, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled at `limit_s` (the loop's clock). Raises Late."""
    if limit_s is None:
        return await work
    try:
        async with asyncio.timeout_at(limit_s):
            return await work
    except TimeoutError as e:
        raise late(host, asked) from e
