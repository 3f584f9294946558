"""What a worker answers when a request's variant could not be loaded: the file, the tensor or the bytes.

A variant is loaded before its first request goes to the engine. One that lost its place in memory since is
read again beside the running batch; when that fails, vLLM only knows that something went wrong. Then the
engine is asked why.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from workers.asgi import Message
from workers.bus.faults import Fault, fault_of
from workers.messages import ERROR_EVENT
from workers.server.http_server import respond

FAILED = 500

Why = Callable[[], Awaitable[Exception | None]]


def refusal(error: Exception) -> tuple[int, bytes]:
    """The status and body of an answer to a request whose variant could not be loaded."""
    status, code = _meaning(fault_of(error))
    return status, json.dumps({"error": {"message": str(error), "code": code}}).encode()


def _meaning(fault: Fault) -> tuple[int, str]:
    match fault:
        case Fault.FILES:
            return 400, "source_unreadable"
        case Fault.VARIANT:
            return 422, "adapter_mismatch"
        case Fault.ENGINE:
            return FAILED, "engine_failed"


async def respond_with(send: Any, error: Exception) -> None:
    """The whole answer, by ASGI."""
    status, body = refusal(error)
    await respond(send, status, [(b"content-type", b"application/json")], body)


class ExplainingSend:
    """ASGI's `send` for a request of a variant. Where the application fails and `why` knows that the variant
    could not be loaded, that is what is sent."""

    def __init__(self, send: Any, why: Why) -> None:
        self._send, self._why = send, why
        self._answered = False

    async def __call__(self, message: Message) -> None:
        if self._answered:
            return
        if message["type"] == "http.response.start":
            if message["status"] >= FAILED and (error := await self._why()) is not None:
                self._answered = True
                await respond_with(self._send, error)
                return
        elif message.get("body", b"").startswith(ERROR_EVENT) and (error := await self._why()) is not None:
            message = {**message, "body": b"data: " + refusal(error)[1] + b"\n\n"}
        await self._send(message)
