"""The two hot routes without FastAPI's router around them, which costs as much as the rest of a request."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane import errors
from controlplane.api import inference
from controlplane.api.failures import respond
from controlplane.api.services import Services

_PATHS = frozenset({inference.CHAT, inference.COMPLETIONS})


class FastPath:
    """Answers completions as `openai.router` would; everything else, and what it does not expect, goes on."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        try:
            raw = await Request(scope, receive).body()
            response = await inference.answer(self._services, scope["path"], raw)
        except errors.OstinatoError as e:
            response = respond(e)
        except ClientDisconnect:
            return
        await response(scope, receive, send)
