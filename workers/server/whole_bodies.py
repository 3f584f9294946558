"""uvicorn's protocol for Serve's proxy: a request is there when its body is.

The proxy begins a call of a gateway for each request that is there, which takes 100 KiB and a place among
others. A body that comes slowly costs a connection instead, and after `LIMIT_S` not even that.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import Any

from workers.asgi import Message
from workers.server.head_limits import BoundedHead, Headers

# As controlplane.settings has them, for a process that is not ours.
LIMIT_S = float(os.environ.get("OSTINATO_BODY_TIMEOUT_S") or 9.0)
LIMIT_BYTES = int(os.environ.get("OSTINATO_MAX_BODY_BYTES") or 4 << 20)
HELD_BYTES = 256 << 20  # of all connections together; beyond that requests go on with what is there
_LATE = b"408 Request Timeout"
_ERROR = {
    "message": f"the body did not arrive within {LIMIT_S:g} s (OSTINATO_BODY_TIMEOUT_S)",
    "type": "invalid_request_error",
    "param": None,
    "code": "body_too_slow",  # as in docs/errors.md
}


@dataclass(frozen=True)
class Refusal:
    """An answer in the application's place: a status line, an error as JSON, headers."""

    status: bytes
    json: bytes
    headers: Headers = ()

    async def answer(self, scope: Message, receive: Any, send: Any) -> None:
        """An application of ASGI that says it."""
        length = (b"content-length", b"%d" % len(self.json))
        headers = [(b"content-type", b"application/json"), length, *self.headers]
        status = int(self.status.split()[0])
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": self.json})


class WholeBodies(BoundedHead):
    """Holds a request back until its body is complete, or so large that its gateway refuses it.

    Then `refusal` may answer it: at once, or in its turn where it came before the last was answered.
    """

    _held_in_all = 0
    _is_refused = False  # the request under way
    _held: bytearray | None = None  # None: nothing is held back
    _body_timer: asyncio.TimerHandle | None = None

    def refusal(self, headers: Headers) -> Refusal | None:
        """None: the application answers."""
        return None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()  # the answer before may have been ours, in the same piece
        self._is_refused = False

    def on_headers_complete(self) -> None:
        has_body = self._has_body()
        if not has_body or WholeBodies._held_in_all > HELD_BYTES:
            self._begin(is_whole=not has_body)
            return
        self._end_head()
        self._held = bytearray()
        self.headers = []  # what comes behind the body (trailers) is no header of the request
        self._body_timer = self.loop.call_later(LIMIT_S, self._too_late)
        self._invite()

    def on_body(self, body: bytes) -> None:
        if self._held is None:
            self._on_passed_body(body)
            return
        self._unread_bytes = 0
        self._held += body
        WholeBodies._held_in_all += len(body)
        if len(self._held) > LIMIT_BYTES or WholeBodies._held_in_all > HELD_BYTES:
            self._go_on(is_whole=False)

    def on_message_complete(self) -> None:
        self._go_on(is_whole=True)
        if self._is_refused:
            self._unread_bytes = 0
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held is not None:
            self._invite()

    def timeout_keep_alive_handler(self) -> None:
        if self._held is None:  # else a body is under way, which has a time of its own
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()
        super().connection_lost(exc)

    def _invite(self) -> None:
        """To send the body, who asked whether to; not into another answer."""
        if self.expect_100_continue and not self._is_answering():
            self.expect_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _has_body(self) -> bool:
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")):
                return not self.parser.should_upgrade()  # to a WebSocket
        return False

    def _go_on(self, is_whole: bool) -> None:
        """With what is there: all of it, most of the time."""
        body = self._let_go()
        if body is not None:
            self._begin(is_whole)
            if body:
                self._on_passed_body(body)

    def _begin(self, is_whole: bool) -> None:
        """The application's call, or its refusal. The connection stays only if no more of the body comes."""
        if self.transport.is_closing():  # who asked on was refused meanwhile
            self._is_refused = True
            return
        refusal = self.refusal(self.scope["headers"])
        if refusal is None:
            super().on_headers_complete()
        elif self._is_answering() and self.parser.should_upgrade() and self._should_upgrade():
            self._is_refused = True  # a WebSocket's: `handle_websocket_upgrade` ends the connection
        elif self._is_answering():
            self._answer_in_turn(refusal)
        else:
            self._answer_at_once(refusal, is_whole and not self.flow.write_paused)

    def _answer_at_once(self, refusal: Refusal, may_stay: bool) -> None:
        self._end_head()
        self._is_refused = True
        stays = may_stay and self.parser.should_keep_alive() and not self.parser.should_upgrade()
        if not stays:
            self._refuse(refusal.status, refusal.json, refusal.headers)
        else:
            self._write(refusal.status, refusal.json, refusal.headers)
            self.on_response_complete()

    def _answer_in_turn(self, refusal: Refusal) -> None:
        """As an application would: uvicorn keeps it until those before it are answered."""
        passed_on, self.app = self.app, refusal.answer
        try:
            super().on_headers_complete()
        finally:
            self.app = passed_on

    def handle_websocket_upgrade(self) -> None:
        """Not into the answers before it, which are the connection's last."""
        if self._is_answering():
            self.cycle.keep_alive = False
        elif not self.transport.is_closing():
            self._go_on_as_websocket()

    def _go_on_as_websocket(self) -> None:
        super().handle_websocket_upgrade()

    def _on_passed_body(self, body: bytes) -> None:
        if self._is_refused:
            self._unread_bytes = 0
        else:
            super().on_body(body)

    def _let_go(self) -> bytes | None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        held, self._held = self._held, None
        if held is None:
            return None
        WholeBodies._held_in_all -= len(held)
        return bytes(held)

    def _too_late(self) -> None:
        self._let_go()
        self._refuse(_LATE, json.dumps({"error": _ERROR}).encode())
