"""What Serve's proxy answers by itself, in our words: a gateway that died, or none that is there yet.

Serve's own answers are an empty 500, or a sentence of plain text. Ours are OpenAI's error object with a
documented code. Not used behind HAProxy, where gateways answer clients themselves.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.runtime.serve_news import keep_asking
from controlplane.runtime.serve_proxy import bound_connections

RETRY_S = 1.0
DIED = errors.Unavailable(
    "the gateway that had this request ended before it answered; it may have been carried out: try again,"
    " changes with the same Idempotency-Key",
    retry_after_s=RETRY_S,
)
ABSENT = errors.Unavailable("no gateway is there: it starts, or stops; try again", retry_after_s=RETRY_S)
CROWDED = errors.Overloaded(
    "every gateway has as many requests as it takes; try again", retry_after_s=RETRY_S
)
HIDDEN = errors.Forbidden("what runs behind this address is not told; GET /docs lists what there is")
UNEXPECTED = errors.OstinatoError("an unexpected error; the gateway's log has its details")
# Statuses of the proxy's own answers in plain text. There is a gateway for every path, so 404 says: none yet.
_MEANING = {404: ABSENT, 429: CROWDED, 500: UNEXPECTED, 503: ABSENT}
_OWN_PATHS = "/-/"  # the proxy's probes, which are not ours
_ROUTES = "/-/routes"  # what runs here, told to anybody


def prepare() -> list[Any]:
    """Serve's proxy calls it before it listens, for middlewares; beside that clients are bounded, and news of
    gateways go on."""
    keep_asking()
    return [*bound_connections(), Middleware(DocumentedErrors)]


class DocumentedErrors:
    """Pure ASGI, around the proxy's application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_probe(scope["path"]):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        if _is_routes(scope["path"]):
            await answer.send_error(HIDDEN)
            return
        await self._app(scope, receive, answer.send)
        await answer.end()


def _is_probe(path: str) -> bool:
    return path.startswith(_OWN_PATHS) and not _is_routes(path)


def _is_routes(path: str) -> bool:
    return path.rstrip("/").lower() == _ROUTES


class _Answer:
    """One answer on its way to the client: what the proxy made itself is replaced, what it left open is
    ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._ended = self._replaced = self._is_stream = False

    async def send(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] == "http.response.start":
            self._started = True
            kind = _header(message, b"content-type")
            self._is_stream = kind.startswith(b"text/event-stream")
            if kind.startswith(b"text/plain") and (error := _MEANING.get(message["status"])) is not None:
                await self.send_error(error)
                return
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Its gateway says no more. A client that left is told in vain."""
        if not self._started:
            await self.send_error(DIED)
        elif self._is_stream and not self._ended:
            event = b"data: " + json.dumps(DIED.body()).encode() + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})

    async def send_error(self, error: errors.OstinatoError) -> None:
        self._replaced = self._started = self._ended = True
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(round(error.retry_after_s)).encode()))
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _header(message: Message, name: bytes) -> bytes:
    for given, value in message.get("headers", ()):
        if given.lower() == name:
            return bytes(value)
    return b""
