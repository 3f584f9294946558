"""What every request passes before its route: an API key (if one is set) and a limit on its size."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api.error_handlers import respond

OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guard:
    """Pure ASGI, so that streaming and disconnects pass through untouched."""

    def __init__(self, app: ASGIApp, api_key: str, max_body_bytes: int) -> None:
        self._app = app
        self._key = f"Bearer {api_key}".encode() if api_key else b""
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check(scope["path"], headers)
        except errors.OstinatoError as e:
            await respond(e)(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._key):
                raise errors.Unauthorized("send the installation's API key as `Authorization: Bearer KEY`")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise errors.InvalidRequest("Content-Length is not a number")
        if int(length) > self._limit:
            raise self._too_large(int(length))

    def _too_large(self, size: int) -> errors.BodyTooLarge:
        return errors.BodyTooLarge(
            f"the body has {size} bytes or more; at most {self._limit} are accepted (OSTINATO_MAX_BODY_BYTES)"
        )

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a Content-Length are counted as they arrive."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large(seen)
            return message

        return counted
