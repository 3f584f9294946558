"""Makes the engine's call of an inference request."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from controlplane import errors
from controlplane.api.inference.body import is_plain
from controlplane.api.request_bounds import DEFAULTS, Bounds, check, grammars_of
from controlplane.gateway.stream_usage import OPTIONS
from controlplane.traffic.endpoints import ENDPOINTS, Endpoint, Format
from controlplane.traffic.request_fields import check_fields
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import DEFAULT, Tenant
from workers.cache_salt import cache_salt
from workers.messages import EngineCall


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
    endpoint = ENDPOINTS[path]
    _check_bytes(endpoint, len(raw))
    check_fields(path, body, bounds.template_arguments)
    check(body, len(raw), bounds, route.requests_at_once)
    changes: dict[str, Any] = {**_bounded(endpoint, body, route.max_output_tokens)}
    if body["model"] != route.model:
        changes["model"] = route.model
    if endpoint.generates and (salt := _salt(tenant, route, body)) is not None:
        changes["cache_salt"] = salt
    if endpoint.format is Format.OPENAI and tenant.quota.tokens_per_minute is not None and body.get("stream"):
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


def _bounded(endpoint: Endpoint, body: dict[str, Any], most: int | None) -> dict[str, int]:
    """The fields that make the engine cut an answer at `most` tokens; None: the context's end."""
    if most is None or not endpoint.generates:
        return {}
    asked = {name: body[name] for name in endpoint.lengths if body.get(name) is not None}
    if asked:
        return {name: most for name, value in asked.items() if value > most}
    name, default = endpoint.lengths[0], endpoint.default_length
    return {name: most} if default is None or name in body or most < default else {}


def _salt(tenant: Tenant, route: Route, body: dict[str, Any]) -> str | None:
    return cache_salt(tenant.cache_salt, route.variant, body.get("cache_salt"))


def _check_bytes(endpoint: Endpoint, size: int) -> None:
    if endpoint.body_bytes is not None and size > endpoint.body_bytes:
        raise errors.InvalidRequest(
            f"the body has {size} bytes, but this call takes at most {endpoint.body_bytes}; send the text in"
            " several requests"
        )
