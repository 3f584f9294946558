"""Every failure becomes an error body with a documented code: OpenAI's, or Anthropic's on its paths."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from controlplane import errors
from controlplane.api.error_formats import error_body
from controlplane.api.hidden_paths import Hide
from controlplane.management.schemas.common import NAME_PATTERN, NAME_RULE
from controlplane.traffic.endpoints import format_of

log = logging.getLogger(__name__)

_MAX_ECHO = 200


def respond(error: errors.OstinatoError, path: str = "") -> JSONResponse:
    """The answer, as clients of the path read it."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, errors.Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, errors.BodyTooSlow):
        headers["Connection"] = "close"  # the server does not wait for the rest of the body
    if isinstance(error, errors.Late):
        headers["x-should-retry"] = "false"
    return _ErrorResponse(error_body(error, format_of(path)), status_code=error.status, headers=headers)


class _ErrorResponse(JSONResponse):
    """A JSON response that escapes non-ASCII characters: a message may repeat a lone surrogate, which
    UTF-8 cannot hold."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def install(app: FastAPI, hide_of: Callable[[str], Hide]) -> None:
    """Install the handlers. `hide_of(path)` gives the function that removes what clients of that path must
    not see."""

    async def ostinato(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, errors.OstinatoError)
        return respond(hide_of(request.url.path)(exc), request.url.path)

    app.add_exception_handler(errors.OstinatoError, ostinato)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _validation(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    message = f"{where}: {_problem(first)}{_got(first)}"
    return respond(errors.InvalidRequest(message, param=where))


def _problem(found: dict[str, Any]) -> str:
    match found["type"]:
        case "string_pattern_mismatch" if found["ctx"]["pattern"] == NAME_PATTERN:
            return f"expected {NAME_RULE}"
        case "extra_forbidden":
            return "unknown field; correct its name, or remove it (docs/api.md lists the fields)"
        case "missing":
            return "this field is required; add it"
    return str(found["msg"]).removeprefix("Value error, ")


def _got(problem: dict[str, Any]) -> str:
    if problem["type"] in ("missing", "extra_forbidden", "json_invalid", "value_error"):
        return ""
    try:
        text = json.dumps(problem.get("input"), default=repr)
    except ValueError:
        text = repr(problem.get("input"))
    return f"; got {text[:_MAX_ECHO]}"


async def _http(request: Request, exc: Exception) -> JSONResponse:
    """Starlette's own refusals: unknown paths, wrong methods."""
    assert isinstance(exc, HTTPException)
    if isinstance(exc.__cause__, errors.OstinatoError):  # FastAPI wraps errors of reading the body
        return respond(exc.__cause__)
    kind = {404: "path_not_found", 405: "method_not_allowed"}.get(exc.status_code, "invalid_request")
    message = f"{request.method} {request.url.path}: {exc.detail}; GET /docs lists the calls"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": kind}}
    return JSONResponse(body, status_code=exc.status_code, headers=exc.headers)


async def _unexpected(request: Request, exc: Exception) -> JSONResponse:
    return unexpected(request.scope, exc)


def unexpected(scope: Scope, exc: Exception) -> JSONResponse:
    """An internal error: the log has the details, the answer only reports that there is one."""
    log.error("unexpected error on %s %s", scope["method"], scope["path"], exc_info=exc)
    error = errors.OstinatoError("an unexpected error in the gateway; the gateway's log has its details")
    return respond(error, scope["path"])
