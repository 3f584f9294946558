"""Differences between clients: spellings of a path, HEAD, pages of other origins, compressed bodies.

Pure ASGI around the audit log and the guard, so that these see each request in its plain form. A body is
unpacked as it is read, which is after the guard accepted the request.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api.error_handlers import respond
from workers.asgi import DIRECT

ANY_ORIGIN = "*"
METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_PREFLIGHT_S = 600  # the time for which a browser remembers the answer
_EXPOSED = "x-request-id, retry-after, x-should-retry"
_ENCODED = b"content-encoding"
_TELLING = frozenset({b"origin", _ENCODED})
# zlib's window, by the encoding's name: with gzip's head, and with zlib's.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Front:
    """A layer around the whole application, or the part of it that answers inference calls."""

    def __init__(self, app: ASGIApp, origins: Collection[str], max_body_bytes: int) -> None:
        """`origins`: sites whose pages may send requests, as browsers name them; `*`: all. An unpacked
        body has at most `max_body_bytes`."""
        self._app = app
        self._origins = frozenset(origins)
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if _needs_other_path(scope["path"]):
                scope = {**scope, "path": plain_path(scope["path"])}
            if scope["method"] in ("HEAD", "OPTIONS") or not _TELLING.isdisjoint(dict(scope["headers"])):
                await self._special(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _special(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin", "")
        if scope["method"] == "OPTIONS":
            await self._options(headers, origin)(scope, receive, send)
            return
        if origin and self._allows(origin):
            scope = {**scope}
            scope.pop(DIRECT, None)  # it would answer without our headers
            send = _with(self._told(origin), send)
        if scope["method"] == "HEAD" and not scope["path"].endswith("/watch"):
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        try:
            if _ENCODED in headers:
                receive = unpacked(receive, headers[_ENCODED], self._limit)
                scope = {**scope, "headers": _of_unpacked(scope["headers"])}
                scope.pop(DIRECT, None)  # its body is packed
        except errors.OstinatoError as e:
            await respond(e, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, origin: str) -> bool:
        return ANY_ORIGIN in self._origins or origin in self._origins

    def _told(self, origin: str) -> list[tuple[bytes, bytes]]:
        named = ANY_ORIGIN if ANY_ORIGIN in self._origins else origin
        return [
            (b"access-control-allow-origin", named.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]

    def _options(self, headers: dict[bytes, str], origin: str) -> Response:
        """The answer to a browser's preflight, which comes before a page's request and without a key."""
        if not origin or b"access-control-request-method" not in headers:
            return Response(status_code=204, headers={"allow": METHODS})
        if not self._allows(origin):
            return respond(
                errors.HostNotAllowed(
                    f"web pages of {origin[:200]!r} may not call this API; add this origin to "
                    "OSTINATO_CORS_ORIGINS"
                )
            )
        answer = Response(status_code=204)
        answer.raw_headers += [
            *self._told(origin),
            (b"access-control-allow-methods", METHODS.encode()),
            (
                b"access-control-allow-headers",
                headers.get(b"access-control-request-headers", "*").encode("latin-1"),
            ),
            (b"access-control-max-age", str(_PREFLIGHT_S).encode()),
        ]
        return answer


def _needs_other_path(path: str) -> bool:
    return (len(path) > 1 and path.endswith("/")) or "//" in path


def plain_path(path: str) -> str:
    """The path in the routes' form: no slash at its end, and single slashes."""
    return "/" + "/".join(part for part in path.split("/") if part)


def _with(headers: list[tuple[bytes, bytes]], send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sending


def _without_body(send: Send) -> Send:
    async def sending(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return sending


def _of_unpacked(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in (_ENCODED, b"content-length")]


def unpacked(receive: Receive, encoding: str, limit: int) -> Receive:
    """A `receive` that unpacks the body. Errors: InvalidRequest for an unknown encoding, or, during
    reading, for a body that is not in it; BodyTooLarge for more than `limit` bytes when unpacked."""
    name = encoding.strip().lower()
    if name == "identity":
        return receive
    if name not in _WINDOWS:
        raise errors.InvalidRequest(
            f"Content-Encoding: expected gzip, deflate or identity; got {encoding[:100]!r}"
        )
    unpacking, size = zlib.decompressobj(_WINDOWS[name]), 0

    async def unpacking_it() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] != "http.request":
            return message
        try:
            body = unpacking.decompress(message.get("body", b""), limit - size + 1)
        except zlib.error as e:
            raise errors.InvalidRequest(
                f"Content-Encoding is {name}, but the body cannot be unpacked as {name}: {e}"
            ) from e
        size += len(body)
        if size > limit:
            raise errors.BodyTooLarge(
                f"the unpacked body has more than the allowed {limit} bytes (OSTINATO_MAX_BODY_BYTES)"
            )
        if not message.get("more_body", False) and (not unpacking.eof or unpacking.unused_data):
            raise errors.InvalidRequest(
                f"expected a body that is exactly one complete {name} stream; the body is cut, or has more "
                "bytes after it"
            )
        return {**message, "body": body}

    return unpacking_it
