"""Writes each requested change into the audit log before it is answered. It wraps the guard."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api.access import ASKING_PATHS
from controlplane.api.middleware import given_key, known_caller
from controlplane.gateway.audit import AuditLog
from controlplane.management.schemas.common import PATH_WORDS
from controlplane.traffic.tenants import shown

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_READ = 1 << 16
_MAX_TEXT = 200


def is_audited(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] not in _READING and scope["path"] not in ASKING_PATHS


@dataclass
class _Exchange:
    """The observed request and its answer, which waits until the audit line is written."""

    asked: bytearray = field(default_factory=bytearray)
    answer: list[Message] = field(default_factory=list)

    def status(self) -> int | None:
        return next((int(m["status"]) for m in self.answer if m["type"] == "http.response.start"), None)

    def answered(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.answer)

    @property
    def whole(self) -> bool:
        last = self.answer[-1] if self.answer else {}
        return last.get("type") == "http.response.body" and not last.get("more_body", False)


class Audited:
    """Pure ASGI. Answers of these calls are short and not streamed, so they wait for their audit line."""

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_audited(scope) or not self._audit.on:
            await self._app(scope, receive, send)
            return
        seen = _Exchange()

        async def receiving() -> Message:
            message = await receive()
            if len(seen.asked) <= _MAX_READ:
                seen.asked += message.get("body", b"")
            return message

        async def sending(message: Message) -> None:
            seen.answer.append(message)
            if not seen.whole:
                return
            await asyncio.to_thread(self._audit.write, _entry(scope, seen, seen.status(), _code(seen)))
            for held in seen.answer:
                await send(held)

        try:
            await self._app(scope, receiving, sending)
        except BaseException as e:
            if not seen.whole:  # the requested change may have happened
                self._audit.write(_entry(scope, seen, *_cut_off(e)))
            raise


def _cut_off(error: BaseException) -> tuple[int | None, str]:
    """The status and code of a request without an answer: the gateway failed, or the client left."""
    if isinstance(error, Exception):
        return errors.OstinatoError.status, errors.OstinatoError.code
    return None, "client_disconnected"


def _entry(scope: Scope, seen: _Exchange, status: int | None, code: str | None) -> dict[str, Any]:
    caller, said = known_caller(scope), _read(seen.answered())
    client = scope.get("client")
    return {
        "event": "request",
        "tenant": caller.tenant.name if caller else None,
        "role": caller.tenant.role if caller else None,
        "key": caller.key if caller else shown(given_key(dict(scope["headers"]))),
        "method": scope["method"],
        "path": scope["path"][:_MAX_TEXT],
        "model": _model(scope["path"], _read(bytes(seen.asked)), said),
        "status": status,
        "code": code,
        "operation": _text(said.get("id")),
        "idempotencyKey": any(name == b"idempotency-key" for name, _ in scope["headers"]),
        "client": client[0] if client else None,
    }


def _code(seen: _Exchange) -> str | None:
    """The code of an error answer."""
    error = _read(seen.answered()).get("error")
    return _text(error.get("code")) if isinstance(error, dict) and (seen.status() or 0) >= 400 else None


def _model(path: str, asked: dict[str, Any], said: dict[str, Any]) -> str | None:
    """The model of the request, from its path, its body, or its answer."""
    parts = path.split("/")
    if len(parts) > 2 and parts[1] in ("models", "deployments"):
        behind = parts[2:-1] if len(parts) > 3 and parts[-1] in PATH_WORDS else parts[2:]
        return "/".join(behind)[:_MAX_TEXT]
    named = (asked.get("model"), asked.get("lora_name"), said.get("target"))
    return next((_text(name) for name in named if isinstance(name, str)), None)


def _text(value: object) -> str | None:
    return value[:_MAX_TEXT] if isinstance(value, str) else None


def _read(raw: bytes) -> dict[str, Any]:
    """A body's fields; empty if it is no JSON object, or too long to read."""
    if not raw or len(raw) > _MAX_READ:
        return {}
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
