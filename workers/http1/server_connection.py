"""One connection of a server: parses requests, answers them in their order, and bounds what a client may do.

A head that is too large or too slow is answered with an error. It would fill the server's memory, or keep a
connection for ever, before any key is checked.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote

import httptools

from workers.asgi import DIRECT, AsgiApp, Message
from workers.http1.answer_head import Headers, answer_head
from workers.http1.limits import BODY_BYTES, PIPELINED, Limits
from workers.http1.outgoing import Outgoing
from workers.http1.served_request import ServedRequest

log = logging.getLogger(__name__)

# Status, headers with the body's length, body.
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]
# Headers that offer another protocol.
_OFFERING = frozenset({b"upgrade", b"http2-settings"})
_VERSIONS = frozenset({"1.1", "1.0"})
_INVALID = b"Invalid HTTP request received."


@dataclass(eq=False, kw_only=True)
class Serving:
    """What all connections of one server share. `refuse` may answer a request in place of `app`, at less
    cost. Each answer has the `default_headers`; each scope has a copy of `state`."""

    app: AsgiApp
    limits: Limits
    refuse: Callable[[Message], Answer | None] = lambda scope: None
    default_headers: Callable[[], Headers] = lambda: ()
    state: dict[str, Any] = field(default_factory=dict)
    connections: set[Any] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class ServerConnection(asyncio.Protocol):
    """`_current` is the request that is being answered, or was answered last. Those in `_pipeline` wait for
    it. `_receiving` is the last request whose head came."""

    out: Outgoing
    _transport: asyncio.Transport

    def __init__(self, serving: Serving, loop: asyncio.AbstractEventLoop) -> None:
        self.default_headers = serving.default_headers
        self._serving = serving
        self._limits = serving.limits
        self._loop = loop
        self._parser = self._new_parser()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects = False
        self._current: ServedRequest | None = None
        self._receiving: ServedRequest | None = None
        self._pipeline: deque[tuple[ServedRequest, Message]] = deque()
        self._is_reading = True
        self._in_head = False
        self._unread_bytes = 0  # since the end of a head, a piece of a body or a request
        self._since_s = 0.0  # when the head, or the time without a request, began
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf

    # --- what asyncio calls ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.out = Outgoing(self._transport, self._loop, self._limits.unread_s)
        self._server, self._client = _address(transport, "sockname"), _address(transport, "peername")
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._serving.connections.add(self)
        self._since_s = self._loop.time()
        self._look_by(self._due_s())

    def connection_lost(self, exc: Exception | None) -> None:
        self._serving.connections.discard(self)
        self._stop_timer()
        self.out.lost()
        for request in (self._current, *(waiting for waiting, _ in self._pipeline)):
            if request is not None and not request.is_answered:
                request.leave()
        self._pipeline.clear()
        del self._parser  # it refers to this object

    def pause_writing(self) -> None:
        self.out.pause()

    def resume_writing(self) -> None:
        self.out.resume()

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as e:
            log.info("a client's request is not valid HTTP: %r", e.__context__ or e)
            self._refuse(400, _INVALID)
            return
        if self._unread_bytes > self._limits.head_bytes:
            self._refuse(431)
        elif self._in_head and not self.is_answering:
            self._look_by(self._due_s())

    def _parse(self, data: bytes) -> None:
        """Parse the data as if its requests offered no other protocol. Raises HttpParserError.

        For example, the JDK's HTTP client asks each plain server for HTTP/2 (`Upgrade: h2c`), with a request
        that has a body. A server may ignore the offer (RFC 9110, 7.8). But httptools treats the data after
        the head as the other protocol's, so the body would be lost.
        """
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                data = self._head_without_offer() + data[stopped.args[0] :]
                self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Data after a request with "connection: close" is ignored; without this it would be an error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _head_without_offer(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        if method == b"CONNECT":  # whatever its headers are, it asks for another protocol
            raise httptools.HttpParserError("expected a request to this server, got CONNECT")
        lines = [b"%b %b HTTP/%b" % (method, self._url, version)]
        lines += [b"%b: %b" % header for header in _without_offer(self._headers)]
        return b"\r\n".join([*lines, b"", b""])

    # --- what httptools calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers, self._expects = b"", [], False
        self._in_head = True
        if self._receiving is not None:  # the first head has the time since the connection began
            self._since_s = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a header behind a chunked body must not pass for one of the head (RFC 9110, 6.5.1)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():  # `_parse` parses it again
            return
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        if self._transport.is_closing() or version not in _VERSIONS:
            raise httptools.HttpParserError(f"expected a request by HTTP 1.1 or 1.0, got one by {version}")
        self._in_head, self._unread_bytes = False, 0
        scope = self._scope(method, version)
        scope[DIRECT] = self._receiving = request = ServedRequest(
            self,
            is_head=method == "HEAD",
            knows_chunks=version == "1.1",
            keeps_alive=version == "1.1" and parser.should_keep_alive(),
            expects=self._expects,
        )
        if self.is_answering:
            self._pipeline.append((request, scope))
            self._pause_reading()
        else:
            self._start(request, scope)

    def _scope(self, method: str, version: str) -> Message:
        path, raw_path, query = target_of(self._url)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "root_path": "",
            "headers": self._headers,
            "state": self._serving.state.copy(),
            "method": method,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
        }

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        request = cast(ServedRequest, self._receiving)
        if not request.is_answered and request.add(body) > BODY_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._unread_bytes = 0
            cast(ServedRequest, self._receiving).end()

    # --- requests, one after the other -------------------------------------------------------------

    @property
    def is_answering(self) -> bool:
        current = self._current
        return bool(self._pipeline) or (current is not None and not current.is_answered)

    def _start(self, request: ServedRequest, scope: Message) -> None:
        self._current = request
        refusal = self._serving.refuse(scope)
        if refusal is not None and request.answer(*refusal):
            return
        task = self._loop.create_task(request.run(self._serving.app, scope))
        self._serving.tasks.add(task)
        task.add_done_callback(self._serving.tasks.discard)

    def answered(self, request: ServedRequest) -> None:
        """The current request was answered."""
        if not request.keeps_alive:
            self.close()
            return
        self._since_s = self._loop.time()
        self._look_by(self._due_s())
        if self._pipeline:
            self._loop.call_soon(self._start_next)
        else:
            self.read_on()

    def _start_next(self) -> None:
        if self._pipeline and not self._transport.is_closing():
            self._start(*self._pipeline.popleft())
            self.read_on()

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read from the socket again, also to see whether the client leaves."""
        if not self._is_reading and len(self._pipeline) <= PIPELINED and not self._transport.is_closing():
            self._is_reading = True
            self._transport.resume_reading()

    # --- ends --------------------------------------------------------------------------------------

    def _refuse(self, status: int, text: bytes = b"") -> None:
        """End the connection. Say why, unless the client would read it as a part of another answer."""
        current = self._current
        if not self._transport.is_closing() and (
            current is None or current.is_answered or not current.has_begun
        ):
            headers = (
                *self.default_headers(),
                (b"content-type", b"text/plain; charset=utf-8"),
                (b"content-length", b"%d" % len(text)),
            )
            head = answer_head(status, headers, keeps_alive=False, may_chunk=False)
            self.out.write_now(head.data + text)
        self.close()

    def close(self) -> None:
        """End the connection after what was written."""
        self.out.flush()
        self._transport.close()

    def shutdown(self) -> None:
        """End the connection when the current request is answered."""
        if self._current is None or self._current.is_answered:
            self.close()
        else:
            self._current.keeps_alive = False

    def cut(self) -> None:
        """End the connection now, if a request is being answered."""
        if self.is_answering:
            self._transport.abort()

    # --- the time for a head, and between requests ---------------------------------------------------

    def _due_s(self) -> float:
        is_idle = self._receiving is not None and not self._in_head
        return self._since_s + (self._limits.idle_s if is_idle else self._limits.head_s)

    def _look_by(self, due_s: float) -> None:
        """Have `_look` called at that time or before. One timer serves all requests: setting a timer for each
        would cost more."""
        if due_s < self._timer_s:
            self._stop_timer()
            self._timer, self._timer_s = self._loop.call_at(due_s, self._look), due_s

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, math.inf

    def _look(self) -> None:
        self._stop_timer()
        if self.is_answering:
            return  # `answered` sets the timer again
        if self._due_s() > self._loop.time():
            self._look_by(self._due_s())
        elif self._in_head:
            self._refuse(408)
        else:  # nothing came: no client waits for an answer
            self.close()


def target_of(url: bytes) -> tuple[str, bytes, bytes]:
    """The path, the path as it was sent, and the query. Raises HttpParserError or UnicodeDecodeError."""
    if url.startswith(b"/") and b"#" not in url and url.isascii():
        raw_path, _, query = url.partition(b"?")
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path, raw_path, query


def _address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    found = transport.get_extra_info(name)
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


def _without_offer(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without an offer; `connection` is dropped if it had nothing else."""
    kept = [(name, value) for name, value in headers if name not in _OFFERING | {b"connection"}]
    named = b",".join(value for name, value in headers if name == b"connection").split(b",")
    others = [token.strip() for token in named if token.strip().lower() not in _OFFERING | {b""}]
    return [*kept, (b"connection", b", ".join(others))] if others else kept
