"""uvicorn's protocol with limits on a request's head, in bytes and in time.

Without them one connection keeps a server's loop busy, or fills its memory, before any key is checked.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable

from workers.server.write_limits import BoundedWrites

Headers = Iterable[tuple[bytes, bytes]]
MAX_HEAD_BYTES = 64 << 10
HEAD_S = 8.0  # from a head's first byte to its last, and from a connection's start to its first head
_TOO_LARGE = b"431 Request Header Fields Too Large"
_LATE = b"408 Request Timeout"


class BoundedHead(BoundedWrites):
    """A connection that answers too large or too slow a head with an error, and closes.

    The size limit also applies to data that follows a body.
    """

    _head_since_s = math.inf  # inf: no head is under way
    _unread_bytes = 0  # since the end of a head, a piece of a body or a request
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_since_s == math.inf:  # not the first head of a connection
            self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread_bytes = 0
        super().on_message_complete()

    def _begin_head(self) -> None:
        self._head_since_s = self.loop.time()
        if self._head_timer is None:  # one timer for all heads in that time
            self._head_timer = self.loop.call_later(HEAD_S, self._look)

    def _end_head(self) -> None:
        self._head_since_s, self._unread_bytes = math.inf, 0

    def _look(self) -> None:
        self._head_timer = None
        if self._head_since_s == math.inf:
            return
        left_s = self._head_since_s + HEAD_S - self.loop.time()
        if left_s > 0:
            self._head_timer = self.loop.call_later(left_s, self._look)
        elif self._is_answering():  # pipelined requests wait for one another, and are not read further
            self._head_timer = self.loop.call_later(HEAD_S, self._look)
        elif self._unread_bytes:
            self._refuse(_LATE)
        else:  # nothing came: no client waits for an answer
            self.transport.close()

    def _is_answering(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _refuse(self, status: bytes, json: bytes = b"", more: Headers = ()) -> None:
        if self.transport.is_closing():
            return
        if not self._is_answering():  # otherwise the client would read it as a part of that answer
            self._write(status, json, (*more, (b"connection", b"close")))
        self.transport.close()

    def _write(self, status: bytes, json: bytes, more: Headers) -> None:
        """Write a whole answer without an application. An answer to HEAD has no body."""
        kind: Headers = ((b"content-type", b"application/json"),) if json else ()
        headers = (*self.server_state.default_headers, *kind, *more)
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        body = b"" if json and self.parser.get_method() == b"HEAD" else json
        self.transport.write(
            b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(json), body)
        )
