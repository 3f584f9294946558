"""Answers the inference calls before FastAPI looks for their route.

FastAPI's routing, dependencies and stacks cost as much as all our own work on such a request. The routes stay
(`routes/inference.py`) for the documentation and for the names of Serve's metrics.
"""

from __future__ import annotations

import logging

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api import request_id
from controlplane.api.departure import unless_client_leaves
from controlplane.api.error_handlers import respond, unexpected
from controlplane.api.inference import answering
from controlplane.api.middleware import body_too_slow, tenant_of
from controlplane.api.services import Services
from controlplane.api.time_limit import TimeLimit
from controlplane.traffic.endpoints import ENDPOINTS
from workers.asgi import DIRECT, DirectRequest

log = logging.getLogger(__name__)

PATHS = frozenset(ENDPOINTS)
# The scope's key for the header with an answer's id.
_ID = "ostinato.request_id"


class InferencePath:
    """Pure ASGI, inside the guard and around the application."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_inference(scope):
            await self._app(scope, receive, send)
            return
        try:
            direct: DirectRequest | None = scope.get(DIRECT)
            raw = None if direct is None else direct.body()
            if raw is None:
                raw = await _body(receive, self._services.limits.body_timeout_s)
            if raw is None:
                return  # the client left
            answer = await unless_client_leaves(
                receive,
                answering.answer(self._services, scope["path"], raw, scope["headers"], tenant_of(scope)),
                direct,
            )
            if answer is None:
                return
            if _answered(scope, answer):
                return
            response = answer
        except errors.OstinatoError as e:
            response = respond(self._services.hide(e), scope["path"])
        except Exception as e:
            response = unexpected(scope, e)
        await response(scope, receive, send)


class InferenceFirst:
    """A layer around a server's application: passes inference calls to `inference`, and all others on.

    Answers have the request's id, or a new one, as Serve's do.
    """

    def __init__(self, app: ASGIApp, inference: ASGIApp) -> None:
        self._app = app
        self._inference = inference

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_inference(scope):
            scope[_ID] = named = request_id.header_of(scope["headers"])
            await self._inference(scope, receive, _with(named, send))
        else:
            scope.pop(DIRECT, None)  # other calls may run in another loop than the server's
            await self._app(scope, receive, send)


def _is_inference(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS


def _answered(scope: Scope, answer: Response) -> bool:
    """Send the answer at once, without ASGI's messages, if possible. True if it was sent."""
    direct: DirectRequest | None = scope.get(DIRECT)
    if direct is None or not isinstance(answer, answering.WholeAnswer):
        return False
    named = scope.get(_ID)
    headers = answer.raw_headers if named is None else [*answer.raw_headers, named]
    return direct.answer(answer.reply.status, headers, answer.reply.body)


def _with(header: tuple[bytes, bytes], send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], header]
        await send(message)

    return sending


async def _body(receive: Receive, limit_s: float) -> bytes | None:
    """The whole body; None when the client leaves before its end. Errors: BodyTooSlow."""
    parts = []
    try:
        with TimeLimit(limit_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as e:
        raise body_too_slow(limit_s) from e
