"""HTTP/1.1 by uvicorn, with one write in place of several small ones.

uvicorn writes an answer's head, each piece of its body and its end separately, and uvloop passes each to the
kernel at once. On loopback a write takes about as long as all the Python code around it, and each wakes the
other side.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

from workers.asgi import Message
from workers.server.head_limits import BoundedHead
from workers.server.plain_requests import PlainCycle, plain_scope

# Status, headers with the body's length, body.
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
# This many bytes are sent at once, before the turn ends.
LIMIT_BYTES = 64 * 1024
# A uvicorn other than the tested one may begin requests differently: then all requests use uvicorn's own
# code.
_FITS = hasattr(BoundedHead, "_start_asgi_task")


class GatheredWrites:
    """A transport whose writes within one turn of the loop are sent as one; the rest is the transport's
    own.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0
        self._planned = False

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > LIMIT_BYTES:
            self.flush()
        elif not self._planned:
            self._planned = True
            self._loop.call_soon(self._end_turn)

    def write_last(self, data: bytes) -> None:
        """Write the data now, after the data gathered before."""
        self._parts.append(data)
        self.flush()

    def flush(self) -> None:
        """Write the gathered data now."""
        if self._parts:
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts, self._size = [], 0
            self._transport.write(whole)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def _end_turn(self) -> None:
        self._planned = False
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatheringProtocol(BoundedHead):
    """uvicorn's protocol over such a transport. A whole answer does not wait for the turn's end.

    One timer per connection closes it when it is idle, instead of one timer per request.
    """

    _plain: PlainCycle | None = None  # the last one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathered = GatheredWrites(transport, self.loop)
        self._idle_since_s = math.inf
        super().connection_made(cast(asyncio.Transport, self._gathered))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # this informs the last request
        super()._unset_keepalive_if_required()
        if self._plain is not None and not self._plain.response_complete and not self._plain.disconnected:
            self._plain.disconnected = True
            self._plain.set()

    def data_received(self, data: bytes) -> None:
        self._idle_since_s = math.inf
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._end_head()
        if not self._begin_plain():
            super().on_headers_complete()

    def _begin_plain(self) -> bool:
        """Begin to answer, if the request is plain and earlier requests are answered."""
        parser, before = self.parser, self.cycle
        busy = before is not None and not before.response_complete
        if busy or self.expect_100_continue or self.limit_concurrency is not None or not _FITS:
            return False
        if parser.get_http_version() != "1.1" or parser.should_upgrade():
            return False
        if not plain_scope(cast(Any, self.scope), parser.get_method(), self.url, self.root_path):
            return False
        self.cycle = self._plain = PlainCycle(
            self._gathered.write_last,
            self.loop,
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            expect_100_continue=False,
            keep_alive=parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        refusal = self.refusal(cast(Any, self.scope))
        if refusal is None or not self._plain.answer(*refusal):
            self._start_asgi_task(self.cycle, self.app)
        else:
            self._plain.let_go()
        return True

    def refusal(self, scope: Message) -> Answer | None:
        """The answer in place of the application's; None: the application answers."""
        return None

    def on_response_complete(self) -> None:
        self._gathered.flush()
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_again(self.timeout_keep_alive)

    # --- idle connections --------------------------------------------------------------------------

    def _look_again(self, after_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(after_s, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        """Does nothing: `timeout_keep_alive_handler` checks whether the connection is idle."""

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            super().timeout_keep_alive_handler()
        elif left_s < math.inf:
            self._look_again(left_s)
