"""The two calls that are asked most, answered before FastAPI looks for their route.

Its routing, dependencies and stacks cost as much as all that we do with such a request. The routes stay
(`routes/openai.py`): they are documented, and Serve names its metrics by them.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane import errors
from controlplane.api import inference
from controlplane.api.error_handlers import respond
from controlplane.api.services import Services

PATHS = frozenset({inference.CHAT, inference.COMPLETIONS})


class InferencePath:
    """Pure ASGI, inside the guard and around the application."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        try:
            raw = await _body(receive)
            if raw is None:
                return  # the client left
            response = await inference.answer(self._services, scope["path"], raw, scope["headers"])
        except errors.OstinatoError as e:
            response = respond(e)
        await response(scope, receive, send)


async def _body(receive: Receive) -> bytes | None:
    """All of it; None when the client leaves before that."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
