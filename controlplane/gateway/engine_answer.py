"""An engine's answer while it is read: its first token, its number of tokens, and whether it is in time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from controlplane.gateway.admission_queue import late
from controlplane.gateway.stream_events import has_token
from controlplane.traffic.request import InferenceRequest
from workers import request_headers
from workers.http1.client import Connection

T = TypeVar("T")

_FAULT = request_headers.FAULT.encode()
_USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
# Events of a stream without a token: one at its beginning or with the reason of its end, and the last one.
_OTHER_EVENTS = 2
_TAIL_BYTES = 4096


class EngineAnswer:
    """An answer that is being read. `on_first` is called once, at a stream's first token or at an answer
    that is not streamed. `tokens` is known after everything was read.

    Reading raises Late when the request is to be dropped: a stream's first token after the request's
    `first_by_s`, everything else after its `whole_by_s`.
    """

    def __init__(
        self, base: str, request: InferenceRequest, connection: Connection, on_first: Callable[[], None]
    ) -> None:
        self._base = base
        self._request = request
        self._connection = connection
        self._on_first = on_first
        self._events = 0
        self._has_token = False
        self._last = self._before_last = b""
        self.status = connection.status
        self.content_type = connection.headers.get(b"content-type", b"application/json").decode("latin-1")
        self.fault = connection.headers.get(_FAULT, b"")
        self.tokens: int | None = None

    async def read(self) -> bytes:
        """The whole answer. Raises BrokenOff, Late."""
        limit_s, reading = self._request.whole_by_s, self._connection.read()
        body = await (reading if limit_s is None else in_time(self._base, self._request, limit_s, reading))
        self._count(body[-_TAIL_BYTES:], 0)
        self._on_first()
        return body

    async def piece(self) -> bytes | None:
        """The next piece of a stream. Raises BrokenOff, Late."""
        limit_s = self._request.whole_by_s if self._has_token else self._request.first_by_s
        piece = await in_time(self._base, self._request, limit_s, self._connection.piece())
        if piece is None:
            self._count(self._before_last + self._last, self._events - _OTHER_EVENTS)
            return None
        if not self._has_token and has_token(piece):
            self._has_token = True
            self._on_first()
        self._events += max(1, piece.count(b"\n\n"))
        self._before_last, self._last = self._last, piece
        return piece

    def _count(self, end: bytes, seen: int) -> None:
        """Count tokens by the usage at the end of the answer, or by the events of the stream."""
        if self.status < 300:
            said = _USAGE.findall(end)
            self.tokens = int(said[-1]) if said else seen if seen > 0 else None


async def in_time(base: str, request: InferenceRequest, limit_s: float | None, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled at `limit_s` (the loop's clock). Raises Late."""
    if limit_s is None:
        return await work
    try:
        async with asyncio.timeout_at(limit_s):
            return await work
    except TimeoutError as e:
        raise late(base, request) from e
