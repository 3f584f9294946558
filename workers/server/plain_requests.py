"""The most frequent requests, answered with less Python than uvicorn's own cycle of request and response.

A request is plain if its connection has no special feature; uvicorn handles all others. An answer of known
length is sent with its head in one piece. An application can avoid tasks and messages of ASGI
(`workers.asgi.DirectRequest`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from workers.asgi import DIRECT, Message

_METHODS = {b"POST": "POST", b"GET": "GET"}
_LENGTH = b"content-length"
# Headers in an answer that change what happens to its connection.
_SPECIAL = frozenset({b"connection", b"transfer-encoding"})
_BODILESS = frozenset({204, 304})


class _Nobody:
    """Ignores news of a request that is already answered."""

    def set(self) -> None: ...


_NOBODY = cast(asyncio.Event, _Nobody())


def plain_scope(scope: Message, method: bytes, url: bytes, root_path: str) -> bool:
    """Complete the scope of a plain request; False, without a change, if the request is not plain."""
    name = _METHODS.get(method)
    if name is None or not url.startswith(b"/") or b"%" in url or b"#" in url or not url.isascii():
        return False
    raw_path, _, query = url.partition(b"?")
    scope["method"] = name
    scope["path"] = root_path + raw_path.decode("ascii")
    scope["raw_path"] = root_path.encode("ascii") + raw_path
    scope["query_string"] = query
    return True


class PlainCycle(RequestResponseCycle):
    """One plain request and its answer. `write_last` writes at once, after all earlier data."""

    def __init__(
        self, write_last: Callable[[bytes], None], loop: asyncio.AbstractEventLoop, **its: Any
    ) -> None:
        super().__init__(message_event=self, **its)  # type: ignore[arg-type]  # of an Event it uses `set` only
        self.body = b""  # type: ignore[assignment]  # usually one piece, which is not copied
        self._write_last = write_last
        self._loop = loop
        self._news = False
        self._event: asyncio.Event | None = None  # created when the application waits
        self._on_leaving: Callable[[], None] | None = None
        self._head: Any = None  # of an answer whose body will be sent with it
        self._length = 0
        cast(Message, self.scope)[DIRECT] = self

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:
            if self.response_complete:
                self.let_go()

    def let_go(self) -> None:
        """Free an answered request without the garbage collector."""
        self.message_event = _NOBODY
        cast(Message, self.scope).pop(DIRECT, None)

    # --- news of the request ---------------------------------------------------------------------

    def set(self) -> None:
        """Signal news: more of the request, its end, a disconnected client, or a complete answer."""
        self._news = True
        if self._event is not None:
            self._event.set()
        if self.disconnected:
            self._left()

    def call(self, on_leaving: Callable[[], None]) -> Callable[[], None]:
        """Call `on_leaving` if the client leaves before the answer is complete; the result cancels this."""
        self._on_leaving = on_leaving
        if self.disconnected:
            self._loop.call_soon(self._left)
        return self._forget

    def _left(self) -> None:
        on_leaving, self._on_leaving = self._on_leaving, None
        if on_leaving is not None:
            on_leaving()

    def _forget(self) -> None:
        self._on_leaving = None

    async def receive(self) -> Any:
        if not (self.disconnected or self.response_complete):
            self.flow.resume_reading()
            if not self._news:
                await self._more()
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = self.body, cast(bytearray, b"")
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def _more(self) -> None:
        if self._event is None:
            self._event = asyncio.Event()
        self._event.clear()
        await self._event.wait()

    # --- the answer ------------------------------------------------------------------------------

    async def send(self, message: Any) -> None:
        if self._head is None:
            if self._waits(message):
                self._head = message
            else:
                await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        head, self._head = self._head, None
        if self.disconnected:
            return
        body = message.get("body", b"")
        is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not is_whole or len(body) != self._length:
            await super().send(head)
            await super().send(message)
            return
        self._send_whole(head["status"], head["headers"], body)

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a head and a whole body, like `send`. False, without any effect, if that must wait."""
        if self.flow.write_paused or self.disconnected or self.response_started or self._head is not None:
            return False
        self._send_whole(status, headers, body)
        return True

    async def send_500_response(self) -> None:
        self._head = None  # the application failed before the body
        await super().send_500_response()

    def _waits(self, message: Message) -> bool:
        """Whether it is the head of an answer of known length, which can be sent with its body."""
        if (
            self.response_started
            or message["type"] != "http.response.start"
            or message["status"] in _BODILESS
        ):
            return False
        length = None
        for name, value in message.get("headers", ()):
            lower = name.lower()
            if lower in _SPECIAL:
                return False
            if lower == _LENGTH:
                length = value
        if length is None or not length.isdigit():
            return False
        self._length = int(length)
        return True

    def _send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        parts = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            parts += (name.lower(), b": ", value, b"\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        text = b"".join(parts)
        lines = len(self.default_headers) + len(headers) + (1 if self.keep_alive else 2)
        if text.count(b"\n") != lines or text.count(b"\r") != lines:
            raise RuntimeError("expected headers of one line each, got one with a line's end in it")
        self._write_last(b"%b\r\n%b" % (text, body))
        self.response_started = self.response_complete = True
        self.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
