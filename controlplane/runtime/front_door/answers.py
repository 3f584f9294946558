"""HAProxy's own answers, as files: OpenAI's error object with a documented code, in place of HTML.

Answers to a request head that is malformed, too large (400) or late (408) stay HAProxy's: HAProxy sends them
before it reads these files.
"""

from __future__ import annotations

import http
import json
from collections.abc import Mapping

from controlplane import errors

RETRY_S = 1.0
ABSENT = errors.Unavailable(
    "no gateway is available: it is starting or stopping; try again", retry_after_s=RETRY_S
)
DIED = errors.Unavailable(
    "the gateway ended or hung before it answered this request, which may have been carried out; try again,"
    " and send changes with the same Idempotency-Key",
    retry_after_s=RETRY_S,
)
UNEXPECTED = errors.OstinatoError("HAProxy failed to handle this request; try again")
HIDDEN = errors.Forbidden("this address does not list its applications; GET /docs lists the calls")
# The error for each status that HAProxy would answer.
_MEANING: Mapping[int, errors.OstinatoError] = {
    500: UNEXPECTED,
    502: DIED,
    503: DIED,
    504: DIED,
}


def files() -> dict[str, bytes]:
    """File contents by file name."""
    whole = {f"{status}.http": _response(error) for status, error in _MEANING.items()}
    return {**whole, "routes.json": _body(HIDDEN), "absent.json": _body(ABSENT)}


def _response(error: errors.OstinatoError) -> bytes:
    body = _body(error)
    lines = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *([] if error.retry_after_s is None else [f"retry-after: {round(error.retry_after_s)}"]),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _body(error: errors.OstinatoError) -> bytes:
    return json.dumps(error.body()).encode()
