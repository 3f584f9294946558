"""Errors as the clients of each API read them, whole and as the last event of a stream. Pure."""

from __future__ import annotations

import json
from typing import Any

from controlplane import errors
from controlplane.traffic.endpoints import Format

# Anthropic's types of errors, by our status; other statuses are the client's mistakes below 500.
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: errors.OstinatoError, of: Format) -> dict[str, Any]:
    """The whole answer. Anthropic's has OpenAI's fields as well: `code` and `param` say more than a type."""
    body = error.body()
    if of is not Format.ANTHROPIC:
        return body
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC.get(error.status, default)
    return {"type": "error", "error": {**body["error"], "type": kind}}


def error_event(error: errors.OstinatoError, of: Format) -> bytes:
    """The last event of a stream that failed."""
    body = error_body(error, of)
    if of is Format.OPENAI:
        return b"data: %b\n\n" % _written(body)
    if of is Format.RESPONSES:
        # OpenAI's event has the fields at its top; its SDK raises an error for an object `error`.
        found = body["error"]
        body = {"type": "error", **{name: found[name] for name in ("code", "message", "param")}, **body}
    return b"event: error\ndata: %b\n\n" % _written(body)


def _written(body: dict[str, Any]) -> bytes:
    """In ASCII: a message may repeat half of a surrogate pair, which UTF-8 cannot hold."""
    return json.dumps(body).encode()
