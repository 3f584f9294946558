"""One request and its answer, between a server's connection and an ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from workers.asgi import AsgiApp, Message
from workers.http1.answer_head import Headers, answer_head, chunk
from workers.http1.outgoing import Outgoing

log = logging.getLogger(__name__)

_BODILESS = frozenset({204, 304})
_FAILED = b"Internal Server Error"
_OF_FAILED = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(_FAILED)),
    (b"connection", b"close"),
)


class Connection(Protocol):
    """What a request needs of its connection."""

    out: Outgoing

    def default_headers(self) -> Headers: ...
    def read_on(self) -> None: ...
    def answered(self, request: ServedRequest) -> None: ...
    def close(self) -> None: ...


class ServedRequest:
    """`keeps_alive`: the connection stays for another request. `has_begun`: a part of the answer was sent;
    `is_answered`: all of it. `is_lost`: the client left before that.

    In a scope it is the `workers.asgi.DirectRequest`.
    """

    def __init__(
        self, connection: Connection, *, is_head: bool, knows_chunks: bool, keeps_alive: bool, expects: bool
    ) -> None:
        """`expects`: the client sends the body after it was told "100 Continue"."""
        self.keeps_alive = keeps_alive
        self.has_begun = self.is_answered = self.is_lost = False
        self._connection = connection
        self._is_head = is_head
        self._knows_chunks = knows_chunks
        self._expects = expects
        self._pieces: list[bytes] = []  # of the body, for the application
        self._waiting_bytes = 0
        self._more_body = True
        self._was_received = False  # at least a part of it
        self._news = False
        self._event: asyncio.Event | None = None  # created when the application waits
        self._on_leaving: Callable[[], None] | None = None
        self._has_head = self._sends_body = self._is_chunked = False
        self._head = b""  # of a body of known length, with which it is sent
        self._left_bytes: int | None = None  # of that length

    async def run(self, app: AsgiApp, scope: Message) -> None:
        """Have the application answer. An answer that it does not complete ends as an error."""
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed at a request")
        finally:
            if not (self.is_answered or self.is_lost):
                self._fail()

    def _fail(self) -> None:
        """Answer 500. If an answer has begun, the end of the connection tells the client."""
        log.error("the application did not complete the answer to a request")
        if self.has_begun:
            self._connection.close()
        else:
            self._has_head = False
            self._begin(500, _OF_FAILED)
            self._send(_FAILED, is_last=True)

    # --- what the connection tells ---------------------------------------------------------------

    def add(self, body: bytes) -> int:
        """Another piece of the body. Returns how many bytes wait for the application."""
        self._pieces.append(body)
        self._waiting_bytes += len(body)
        self._tell()
        return self._waiting_bytes

    def end(self) -> None:
        """The body is whole."""
        self._more_body = False
        self._tell()

    def leave(self) -> None:
        """The client has left."""
        self.is_lost = True
        self._tell()
        if self._on_leaving is not None:
            self._on_leaving()
            self._on_leaving = None

    def _tell(self) -> None:
        self._news = True
        if self._event is not None:
            self._event.set()

    # --- what the application asks ---------------------------------------------------------------

    def call(self, on_leaving: Callable[[], None]) -> Callable[[], None]:
        """Call `on_leaving` if the client leaves before the answer is complete; the result cancels this."""
        self._on_leaving = on_leaving
        if self.is_lost:
            asyncio.get_running_loop().call_soon(self.leave)
        return self._forget

    def _forget(self) -> None:
        self._on_leaving = None

    def body(self) -> bytes | None:
        if self._more_body or self._was_received or self.is_lost:
            return None
        self._connection.read_on()  # a large body had paused it
        return self._received()

    async def receive(self) -> Any:
        if self._expects and not self.has_begun:
            self._expects = False
            self._connection.out.write_now(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not (self.is_answered or self.is_lost):
            self._connection.read_on()
            if not self._news:
                await self._more()
        if self.is_answered or self.is_lost:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._received(), "more_body": self._more_body}

    def _received(self) -> bytes:
        """The part of the body that waits, for the application."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._waiting_bytes = [], 0
        self._was_received, self._news = True, False
        return body

    async def _more(self) -> None:
        if self._event is None:
            self._event = asyncio.Event()
        self._event.clear()
        await self._event.wait()

    async def send(self, message: Any) -> None:
        if self._connection.out.is_paused:
            await self._connection.out.drain()
        if self.is_lost:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._send(message.get("body", b""), not message.get("more_body", False))
        else:
            raise RuntimeError(f"expected http.response.start or http.response.body, got {message['type']}")

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a head and a whole body, like `send`. False, without any effect, if that must wait."""
        if self._connection.out.is_paused or self.is_lost or self._has_head:
            return False
        self._begin(status, headers)
        self._send(body, is_last=True)
        return True

    # --- the answer ------------------------------------------------------------------------------

    def _begin(self, status: int, headers: Headers) -> None:
        if self._has_head:
            raise RuntimeError("expected http.response.body, got a second http.response.start")
        if self._expects and self._more_body:  # what comes next may be this body or another request
            self.keeps_alive = False
        self._sends_body = not self._is_head and status not in _BODILESS
        head = answer_head(
            status,
            (*self._connection.default_headers(), *headers),
            keeps_alive=self.keeps_alive,
            may_chunk=self._sends_body and self._knows_chunks,
        )
        self._has_head = True
        self.keeps_alive, self._is_chunked, self._left_bytes = not head.closes, head.is_chunked, head.length
        if head.length is not None:
            self._head = head.data
        else:
            self._connection.out.write(head.data)
            self.has_begun = True

    def _send(self, body: bytes, is_last: bool) -> None:
        if self.is_answered or not self._has_head:
            raise RuntimeError("expected http.response.start, got http.response.body")
        data = self._framed(body, is_last)
        if self._head:
            data, self._head = self._head + data, b""
        self.has_begun = True
        if not is_last:
            self._connection.out.write(data)
            return
        self.is_answered = True
        self._connection.out.write_now(data)
        self._tell()
        self._connection.answered(self)

    def _framed(self, body: bytes, is_last: bool) -> bytes:
        if not self._sends_body:
            return b""
        if self._is_chunked:
            return chunk(body, is_last)
        if self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (is_last and self._left_bytes):
                raise RuntimeError("expected a body of content-length bytes, got another length")
        return body
