"""Makes the engine's call of an inference request."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from controlplane import errors
from controlplane.api.inference.body import is_plain
from controlplane.api.request_bounds import DEFAULTS, Bounds, check, grammars_of
from controlplane.gateway.stream_usage import OPTIONS
from controlplane.traffic.request_fields import CHAT, LENGTHS, check_fields
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import DEFAULT, Tenant
from workers.cache_salt import cache_salt
from workers.messages import EngineCall

COMPLETION_TOKENS = 16  # the default length of a completion


def engine_call(
    path: str,
    body: dict[str, Any],
    route: Route,
    raw: bytes = b"",
    counted: bool = True,
    bounds: Bounds = DEFAULTS,
    *,
    tenant: Tenant = DEFAULT,
) -> EngineCall:
    """The engine's call for a request: the engine's name of the model, a bounded answer, and a cache salt.

    The salt keeps KV blocks apart from those of other tenants and, for a variant, from those of an earlier
    variant of the same name. If the tenant has a quota of tokens, each event of a stream reports its usage.
    `raw` is the text of `body`; it is sent as it came where it only needs additions.

    Errors: InvalidRequest for a field that may not reach the engine, or a value beyond `bounds`.
    """
    check_fields(path, body, bounds.template_arguments)
    check(body, len(raw), bounds, route.requests_at_once)
    changes: dict[str, Any] = {**_bounded(path, body, route.max_output_tokens)}
    if body["model"] != route.model:
        changes["model"] = route.model
    if (salt := cache_salt(tenant.cache_salt, route.variant, body.get("cache_salt"))) is not None:
        changes["cache_salt"] = salt
    if tenant.quota.tokens_per_minute is not None and body.get("stream"):
        changes["stream_options"] = {**(body.get("stream_options") or {}), **OPTIONS}
    # The gateway acts on a numeric priority; vLLM would refuse it.
    is_written = type(body.get("priority")) is int or "stream_options" in changes
    sent = None if is_written else _with_more(raw, body, changes)
    sent = _written(body, changes) if sent is None else sent
    grammar = next(iter(grammars_of(body)), "")
    return EngineCall(path, sent, route.variant, route.variant_limit, counted, grammar)


def _with_more(raw: bytes, body: dict[str, Any], more: dict[str, str | int]) -> bytes | None:
    """`raw` with more fields at its end; None where it has one of them, or is not ASCII."""
    if not is_plain(raw) or not more.keys().isdisjoint(body):
        return None
    if not more:
        return raw
    return b"%b, %b" % (raw.rstrip()[:-1], _fields(tuple(more.items())))


@lru_cache(1024)
def _fields(added: tuple[tuple[str, str | int], ...]) -> bytes:
    """The end of a JSON object that has these fields last."""
    return json.dumps(dict(added)).encode()[1:]


def _written(body: dict[str, Any], changes: dict[str, Any]) -> bytes:
    sent = {**body, **changes}
    if type(sent.get("priority")) is int:
        del sent["priority"]
    try:
        return json.dumps(sent).encode()
    except RecursionError as e:
        raise errors.InvalidRequest("the body is nested too deeply") from e


def _bounded(path: str, body: dict[str, Any], most: int | None) -> dict[str, int]:
    """The fields that make the engine cut an answer at `most` tokens; None: the context's end."""
    if most is None:
        return {}
    asked = {name: body[name] for name in LENGTHS[path] if body.get(name) is not None}
    if asked:
        return {name: most for name, value in asked.items() if value > most}
    if path == CHAT:
        return {"max_completion_tokens": most}
    return {"max_tokens": most} if "max_tokens" in body or most < COMPLETION_TOKENS else {}
