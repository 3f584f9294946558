"""Answers one OpenAI request: parsed, resolved, admitted, sent, answered (see ARCHITECTURE.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

from controlplane.api.inference.body import parse_body
from controlplane.api.inference.engine_call import engine_call
from controlplane.api.inference.request_record import RequestRecord
from controlplane.api.inference.streams import streamed
from controlplane.api.services import Services
from controlplane.api.time_limit import TimeLimit, timed_out
from controlplane.gateway.engine_errors import from_engine
from controlplane.traffic.body_bounds import check_parts
from controlplane.traffic.endpoints import ENDPOINTS
from controlplane.traffic.request_terms import (
    Headers,
    RequestTerms,
    cut_at,
    estimated_prompt,
    estimated_tokens,
    request_terms,
)
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import DEFAULT, Tenant
from workers.messages import EngineCall, EngineReply


async def answer(
    services: Services, path: str, raw: bytes, headers: Headers = (), tenant: Tenant = DEFAULT
) -> Response:
    """The answer to one request with this body, a stream if it asks for one."""
    with RequestRecord(services) as record:
        services.rates.request(tenant)
        services.rates.body(tenant, len(raw))
        check_parts(raw, services.limits.body_parts)
        body = parse_body(raw)
        record.counted = not services.metrics.is_probe(body.get("request_id"))

        name = body["model"]
        route = services.routes.known(name, tenant) or await services.routes.resolve(name, tenant)
        record.resolved(route)
        call = engine_call(path, body, route, raw, record.counted, services.request_bounds, tenant=tenant)

        limit = cut_at(path, body, route.max_output_tokens)
        terms = terms_of(route, headers, body, len(raw), limit, tenant)
        if body.get("stream") is True:
            record.charge_tenant(terms, ENDPOINTS[path], stream=body)
            return await streamed(services.cluster.stream(route.base, call, terms), call, record)
        record.charge_tenant(terms, ENDPOINTS[path])
        return await _whole(services, route, call, record)


def terms_of(
    route: Route,
    headers: Headers,
    body: Mapping[str, Any],
    body_bytes: int,
    limit: int | None,
    tenant: Tenant,
) -> RequestTerms:
    """The terms of a request for this route, with its cost estimated from the size of its body. Each answer
    is cut at `limit` tokens; None: at the context's end. Errors: those of `request_terms`."""
    tokens = estimated_tokens(body_bytes, body, limit, route.context_tokens)
    prompt = estimated_prompt(body_bytes)
    return request_terms(headers, body, route.targets, tenant, tokens, prompt, limit is not None)


async def ask(services: Services, route: Route, call: EngineCall, terms: RequestTerms) -> EngineReply:
    """The engine's whole answer. Errors: Overloaded, Late, TimedOut, and those of the engine's status."""
    limit_s = services.settings.request_timeout_s
    try:
        with TimeLimit(limit_s):
            reply = await services.cluster.call(route.base, call, terms)
    except TimeoutError as e:
        raise timed_out(limit_s) from e
    if reply.status >= 300:
        raise from_engine(reply.status, reply.body, call.grammar)
    return reply


async def _whole(services: Services, route: Route, call: EngineCall, record: RequestRecord) -> Response:
    reply = await ask(services, route, call, record.terms)
    if record.charge is not None:
        record.charge.whole(reply.body)
    record.end("ok")
    return WholeAnswer(reply)


class WholeAnswer(Response):
    """An engine's answer as it came."""

    def __init__(self, reply: EngineReply) -> None:
        self.reply = reply
        self.status_code, self.body, self.background = reply.status, reply.body, None
        self.raw_headers = [
            (b"content-length", str(len(reply.body)).encode()),
            (b"content-type", reply.content_type.encode("latin-1")),
        ]
