"""A worker's answer when a request's variant could not be loaded: the file, the tensor or the bytes.

A variant is loaded before its first request goes to the engine. A variant that has left memory since is read
again while batches run. If that fails, vLLM reports only a failure; then the engine is asked for the reason
(`failed_requests.py`).
"""

from __future__ import annotations

import json
from typing import Any

from workers import request_headers
from workers.bus.faults import Fault, fault_of
from workers.server.http_server import respond

FAILED = 500
JSON = (b"content-type", b"application/json")
FAULT = request_headers.FAULT.encode()


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
    """Send the whole answer, by ASGI."""
    status, body = refusal(error)
    headers = [JSON, (FAULT, request_headers.OF_LOADING)] if status >= FAILED else [JSON]
    await respond(send, status, headers, body)
