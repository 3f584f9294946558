"""The routes of the table of endpoints, for the documentation and for the names of Serve's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from controlplane.api import request_bounds
from controlplane.api.inference import answering
from controlplane.api.middleware import tenant_of
from controlplane.api.routes.management import ERRORS
from controlplane.api.services import Services
from controlplane.traffic.endpoints import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    ENDPOINTS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Format,
)

_TEXT = {"type": "string", "minLength": 1}


def _messages(*roles: str) -> dict[str, Any]:
    properties = {"role": {"type": "string", "enum": roles}, "content": {"type": "string"}}
    message = {"type": "object", "required": ["role", "content"], "properties": properties}
    return {"type": "array", "minItems": 1, "items": message}


_WORDS = {"type": "array", "items": {"type": "string"}, "maxItems": request_bounds.MAX_WORDS}
_SAMPLING: Mapping[str, Any] = {
    "stream": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
_SEEDED: Mapping[str, Any] = {
    **_SAMPLING,
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
}
_LENGTH = {"type": "integer", "minimum": 1}
_OPENAI: Mapping[str, Any] = {
    **_SEEDED,
    "max_tokens": _LENGTH,
    "stop": {"anyOf": [{"type": "string"}, _WORDS]},
}
_CHAT_ROLES = ("system", "user", "assistant")

# By path: what the call does, its required fields, and other fields. `ENDPOINTS` has all fields.
_DOCUMENTED: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    CHAT: ("A chat completion.", {"messages": _messages(*_CHAT_ROLES)}, _OPENAI),
    COMPLETIONS: ("A text completion.", {"prompt": _TEXT}, _OPENAI),
    RESPONSES: (
        "A response. It is not kept: send the whole conversation in `input`.",
        {"input": _TEXT},
        {**_SEEDED, "instructions": {"type": "string"}, "max_output_tokens": _LENGTH},
    ),
    MESSAGES: (
        "A message, in Anthropic's form.",
        {"messages": _messages("user", "assistant"), "max_tokens": _LENGTH},
        {**_SAMPLING, "system": {"type": "string"}, "stop_sequences": _WORDS},
    ),
    COUNT_TOKENS: (
        "The number of tokens of a message's prompt.",
        {"messages": _messages("user", "assistant")},
        {"system": {"type": "string"}},
    ),
    TOKENIZE: (
        "The tokens of a text (`prompt`) or of a chat (`messages`), by the model's tokenizer and template.",
        {},
        {"prompt": {"type": "string"}, "return_token_strs": {"type": "boolean"}},
    ),
    DETOKENIZE: (
        "The text of tokens.",
        {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
        {},
    ),
}


def router(services: Services) -> APIRouter:
    routes = APIRouter(responses=ERRORS)

    def add(path: str) -> None:
        summary, required, others = _DOCUMENTED[path]

        # Never called: `inference/fast_path.py` answers first.
        async def asked(request: Request) -> Response:
            tenant = tenant_of(request.scope)
            return await answering.answer(services, path, await request.body(), request.headers.raw, tenant)

        routes.add_api_route(
            path,
            asked,
            methods=["POST"],
            name=path.strip("/").replace("/", "_"),
            tags=["anthropic" if ENDPOINTS[path].format is Format.ANTHROPIC else "openai"],
            summary=summary,
            openapi_extra=_body(required, others),
            responses=_answers("stream" in ENDPOINTS[path].fields),
        )

    for path in ENDPOINTS:
        add(path)
    return routes


def _body(required: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    model = {"type": "string", "minLength": 1, "description": "A deployed name, or base:variant."}
    schema = {
        "type": "object",
        "required": ["model", *required],
        "properties": {"model": model, **others, **required},
        "additionalProperties": True,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _answers(streams: bool) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    description = "The engine's answer"
    if streams:
        content["text/event-stream"] = {}
        description += "; server-sent events when `stream` is true"
    return {200: {"description": f"{description}.", "content": content}}
