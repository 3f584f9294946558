"""A worker's answers when its engine's application fails at a request.

If the variant could not be loaded, the answer has the reason. The application may fail at a request that it
does not understand while its engine continues. Such a request is refused: vLLM's application fails at some
fields of a wrong type, and after a 500 clients would retry. A header tells gateways, since an application
that fails at every request is unhealthy. The application's own answers are unchanged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from workers import request_headers
from workers.asgi import Message
from workers.messages import ERROR_EVENT
from workers.server.http_server import respond
from workers.server.loading_errors import FAILED, FAULT, JSON, refusal, respond_with

log = logging.getLogger(__name__)

REFUSED = 400
# Errors of code that did not expect such a value. Any other error may be the engine's, or the machine's.
SLIPS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RecursionError),
    *(TypeError, ValueError),
)
_LONGEST = 200  # characters of an error's text
_EVENTS = b"text/event-stream"
# vLLM's error for a request that it gave up, and its words for it in every API.
_GENERATION_ERROR, GIVEN_UP = "GenerationError", "Internal server error"
_CLIENT_ERROR = "VLLMClientError"  # vLLM's class of errors about a request

Why = Callable[[], Awaitable[Exception | None]]
Lives = Callable[[], bool]


async def nothing_known() -> None:
    """`Why` for the base's requests."""


async def answered(answer: Callable[[Any], Awaitable[None]], send: Any, why: Why, lives: Lives) -> None:
    """Run `answer` with an ASGI `send` that holds answers of FAILED back until the reason is known.

    `why`: the load error of the request's variant, or None. `lives`: whether the engine continues. Raises the
    errors of `answer` once a part of an answer has been sent.
    """
    sending = _Sending(send, why)
    try:
        await answer(sending)
    except Exception as e:
        if sending.has_begun and not (sending.is_stream and lives()):
            raise
        log.warning("the engine's application failed at a request: %.200r (%s)", e, _where(e))
        if sending.has_begun:
            await sending.end(_failed_event(e))
            return
        if isinstance(e, SLIPS) and lives() and await why() is None:
            headers = [JSON, (FAULT, request_headers.OF_UNDERSTANDING)]
            await respond(send, REFUSED, headers, _not_understood(e))
            return
        if not sending.kept:
            await respond(sending, FAILED, [JSON], _error(FAILED, f"the engine failed: {e!r:.{_LONGEST}}"))
    if sending.kept:
        await _say_why(send, sending.kept, why)


async def _say_why(send: Any, kept: list[Message], why: Why) -> None:
    if (known := await why()) is not None:
        await respond_with(send, known)
        return
    for message in kept:
        await send(message)


def _where(error: Exception) -> str:
    """The file and line that raised the error, without the text of all frames."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"


def _not_understood(error: Exception) -> bytes:
    return _error(
        REFUSED,
        f"the engine's server cannot handle this request ({type(error).__name__}:"
        f" {str(error)[:_LONGEST]}); correct the body: most likely a value has a wrong type",
    )


def _failed_event(error: Exception) -> bytes:
    """The event that ends a stream whose generator failed, as vLLM's streams of chats end. A value that the
    engine refuses is the request's mistake, although the stream has begun."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(type(cause).__name__ == _GENERATION_ERROR for cause in causes):
        return b"data: " + _error(FAILED, GIVEN_UP) + b"\n\n"
    if (refused := next(filter(_is_refusal, causes), None)) is not None:
        return b"data: " + _error(REFUSED, str(refused), getattr(refused, "parameter", None)) + b"\n\n"
    return b"data: " + _error(FAILED, f"the engine failed: {error!r:.{_LONGEST}}") + b"\n\n"


def _is_refusal(error: BaseException) -> bool:
    """Whether the error is about the request: vLLM 0.26 raises ValueError, 0.32 a class of its own."""
    return any(kind.__name__ in ("ValueError", _CLIENT_ERROR) for kind in type(error).__mro__)


def _error(code: int, message: str, param: str | None = None) -> bytes:
    named = {} if param is None else {"param": param}
    return json.dumps({"error": {"message": message, "code": code, **named}}).encode()


class _Sending:
    """ASGI's `send`: holds an answer of FAILED back, and adds the reason to a stream's error event."""

    def __init__(self, send: Any, why: Why) -> None:
        self._send, self._why = send, why
        self.kept: list[Message] = []
        self.has_begun = self.is_stream = False

    async def __call__(self, message: Message) -> None:
        if self.kept or (message["type"] == "http.response.start" and message["status"] >= FAILED):
            self.kept.append(message)
            return
        self.has_begun = True
        if message["type"] == "http.response.start":
            self.is_stream = any(_EVENTS in value for _, value in message.get("headers", ()))
        if message.get("body", b"").startswith(ERROR_EVENT) and (error := await self._why()) is not None:
            message = {**message, "body": b"data: " + refusal(error)[1] + b"\n\n"}
        await self._send(message)

    async def end(self, event: bytes) -> None:
        """End a stream that has begun with this event."""
        await self({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
