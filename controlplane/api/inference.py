"""A request's path from a parsed body to the engine and back. ARCHITECTURE.md numbers the hops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from controlplane import errors
from controlplane.api.departure import unless_client_leaves
from controlplane.api.request_bounds import DEFAULTS, Bounds, check, grammars_of
from controlplane.api.services import Services
from controlplane.api.time_limit import TimeLimit, WriteLimit
from controlplane.gateway.engine_errors import from_engine, from_engine_event
from controlplane.gateway.metrics import UNKNOWN
from controlplane.gateway.rate_book import Charge
from controlplane.gateway.stream_usage import OPTIONS, StreamUsage
from controlplane.settings import WRITE_TIMEOUT_S
from controlplane.traffic.attainment import Outcome, attained
from controlplane.traffic.body_bounds import check_parts
from controlplane.traffic.request_fields import CHAT, LENGTHS, check_fields
from controlplane.traffic.request_terms import (
    NO_TERMS,
    Headers,
    RequestTerms,
    cut_at,
    estimated_prompt,
    estimated_tokens,
    request_terms,
)
from controlplane.traffic.route_table import Route
from controlplane.traffic.tenants import DEFAULT, Tenant
from workers.asgi import DIRECT
from workers.messages import ERROR_EVENT, EngineCall, EngineHead, EngineReply

log = logging.getLogger(__name__)

# A half of a surrogate pair, which may stand alone. It begins with bytes that are quickly searched for.
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_CODED_HALF = re.compile(rb"\xed[\xa0-\xbf]")
COMPLETION_TOKENS = 16  # of a completion that says no length, as OpenAI has it
_MAX_SALT = 128  # characters that vLLM takes
_NO_SALT = frozenset("@/\\\0")  # and that it does not, for they mean something to stores of KV blocks
CLIENT_GONE = "client_disconnected"
# What ends a request that no engine worked at, or in vain: it costs no tokens.
_IN_VAIN = (
    errors.InvalidRequest,
    errors.NotReady,
    errors.Overloaded,
    errors.RateLimited,
    errors.EngineFailed,
    errors.Unavailable,
)
CUT = "cut"  # the client read nothing of its answer for too long


def parse_body(raw: bytes) -> dict[str, Any]:
    """Errors: InvalidRequest when it is not a JSON object naming a model."""
    try:
        body = json.loads(raw.decode("ascii") if _is_plain(raw) else raw)
    except (ValueError, RecursionError) as e:
        raise errors.InvalidRequest(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise errors.InvalidRequest(f"expected a JSON object, got a {type(body).__name__}")
    if _ESCAPED_HALF.search(raw) or _CODED_HALF.search(raw) or b"\0" in raw[:4]:  # UTF-16, UTF-32: a zero
        _check_text(body)
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise errors.InvalidRequest("`model` must be the name of a served model", param="model")
    return body


def _check_text(body: dict[str, Any]) -> None:
    """Errors: InvalidRequest where half of a surrogate pair stands alone: nobody can write it down."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise errors.InvalidRequest(
            f"the body has half of a surrogate pair, {e.object[e.start]!a}: expected both of a character"
        ) from e
    except RecursionError as e:
        raise errors.InvalidRequest("the body is nested too deeply") from e


def _is_plain(raw: bytes) -> bool:
    """Whether it is an object's ASCII. (UTF-16 and UTF-32 have a zero after, or before, its bracket.)"""
    return raw.isascii() and raw[:1] == b"{" and raw[1:2] != b"\0"


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
    """The body as the engine should see it: its own name for the model, a bounded answer, and a cache salt
    that keeps its KV blocks from those of other tenants and, for a variant, of an earlier one of its name.

    A stream of a tenant whose tokens are counted is to say in each event what was used until then.

    `raw` is what `body` was read from, which is sent as it came where it needs no change but additions.

    Errors: InvalidRequest for a field that the engine may not be sent, and for what is beyond `bounds`.
    """
    check_fields(path, body, bounds.template_arguments)
    check(body, len(raw), bounds)
    changes: dict[str, Any] = {**_bounded(path, body, route.max_output_tokens)}
    if body["model"] != route.model:
        changes["model"] = route.model
    if (own := _salt(route, tenant.cache_salt)) is not None:
        changes["cache_salt"] = _with_salt(own, body.get("cache_salt"))
    if tenant.quota.tokens_per_minute is not None and body.get("stream"):
        changes["stream_options"] = {**(body.get("stream_options") or {}), **OPTIONS}
    # A number is taken into the request's terms; vLLM would refuse it.
    is_written = type(body.get("priority")) is int or "stream_options" in changes
    sent = None if is_written else _with_more(raw, body, changes)
    sent = _written(body, changes) if sent is None else sent
    grammar = next(iter(grammars_of(body)), "")
    return EngineCall(path, sent, route.variant, route.variant_limit, counted, grammar)


def _salt(route: Route, salt: str) -> str | None:
    """What a client's own salt comes after: it reaches the caches of none but its tenant, and of this uid."""
    if route.variant is None:
        return salt or None
    return f"{salt}:{route.variant.uid}" if salt else str(route.variant.uid)


def _with_salt(own: str, given: object) -> str:
    """A client's salt that is too long beside ours, or not as vLLM takes it, is sent as its hash."""
    text = f"{own}:{given or ''}"
    is_taken = len(text) <= _MAX_SALT and _NO_SALT.isdisjoint(text)
    return text if is_taken else f"{own}:{sha256(text.encode(errors='replace')).hexdigest()}"


def _with_more(raw: bytes, body: dict[str, Any], more: dict[str, str | int]) -> bytes | None:
    """`raw` with fields that it lacks, at its end; None where it has one of them, or is not ASCII."""
    if not _is_plain(raw) or not more.keys().isdisjoint(body):
        return None
    if not more:
        return raw
    return b"%b, %b" % (raw.rstrip()[:-1], _fields(tuple(more.items())))


@lru_cache(1024)
def _fields(added: tuple[tuple[str, str | int], ...]) -> bytes:
    """How an object ends that has these fields last."""
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
    """What has the engine cut an answer at `most` tokens, where it would not; None: at the context's end."""
    if most is None:
        return {}
    asked = {name: body[name] for name in LENGTHS[path] if body.get(name) is not None}
    if asked:
        return {name: most for name, value in asked.items() if value > most}
    if path == CHAT:
        return {"max_completion_tokens": most}
    return {"max_tokens": most} if "max_tokens" in body or most < COMPLETION_TOKENS else {}


@dataclass(slots=True)
class Watch:
    """Times one request and counts how it ended, once; nothing of one that is not `counted`."""

    services: Services
    model: str = UNKNOWN
    start_s: float = 0.0
    ended: bool = False
    counted: bool = True
    terms: RequestTerms = NO_TERMS
    streams: bool = False
    first_s: float | None = None
    chunks: int = 0
    charged: Charge | None = None

    def __post_init__(self) -> None:
        self.start_s = time.perf_counter()

    def routed(self, route: Route) -> None:
        self.model = route.model
        if self.counted:
            self.services.metrics.of(self.model).begin()

    def charge(self, tenant: Tenant) -> None:
        """By the most that its terms say it costs. Errors: RateLimited."""
        self.charged = self.services.rates.charge(tenant, self.terms.tokens)

    def chunk(self, item: EngineHead | bytes) -> None:
        """One of a stream came."""
        self.chunks += 1
        if self.charged is not None and isinstance(item, bytes):
            self.charged.saw(item)
        if self.first_s is None:
            self.first_s = time.perf_counter() - self.start_s
            if self.counted:
                self.services.metrics.of(self.model).ttft.observe(self.first_s)

    def shown(self, piece: bytes) -> bytes:
        """What of a stream's piece goes to the client."""
        usage = None if self.charged is None else self.charged.usage
        return piece if usage is None else usage.passed(piece)

    def fail(self, error: errors.OstinatoError) -> None:
        """It ended with this error."""
        if self.counted and not self.ended:
            self.services.metrics.refused_as(self.model, error)
        if self.charged is not None and not self.chunks and isinstance(error, _IN_VAIN):
            self.charged.settle(0)
        self.end(error.code)

    def end(self, code: str, by_client: bool = False) -> None:
        """Ended `by_client`, it says nothing of targets."""
        if self.charged is not None and self.chunks:
            self.charged.streamed(self.terms.prompt_tokens)
        if self.ended or not self.counted:
            return
        self.ended = True
        took_s = time.perf_counter() - self.start_s
        metrics = self.services.metrics
        of_model = metrics.of(self.model)
        of_model.ended(code).inc()
        if self.model != UNKNOWN:
            of_model.in_flight -= 1
            of_model.duration.observe(took_s)
            seen = Outcome(
                CLIENT_GONE if by_client else code, self.streams, self.first_s, took_s, self.chunks
            )
            for target, is_kept in attained(self.terms, seen):
                metrics.targets.labels(self.model, target, str(is_kept).lower()).inc()


async def answer(
    services: Services, path: str, raw: bytes, headers: Headers = (), tenant: Tenant = DEFAULT
) -> Response:
    """Route one OpenAI request and answer it, streaming if it asks for that."""
    watch = Watch(services)
    try:
        services.rates.request(tenant)
        services.rates.body(tenant, len(raw))
        check_parts(raw, services.settings.max_body_parts)
        body = parse_body(raw)
        watch.counted = not services.metrics.is_probe(body.get("request_id"))
        name = body["model"]
        route = services.routes.known(name, tenant) or await services.routes.resolve(name, tenant)
        watch.routed(route)
        bounds = services.request_bounds
        call = engine_call(path, body, route, raw, watch.counted, bounds, tenant=tenant)
        limit = cut_at(path, body, route.max_output_tokens)
        tokens = estimated_tokens(len(raw), body, limit, route.context_tokens)
        prompt = estimated_prompt(len(raw))
        watch.terms = request_terms(headers, body, route.targets, tenant, tokens, prompt, limit is not None)
        watch.streams = body.get("stream") is True
        watch.charge(tenant)
        if watch.streams:
            if watch.charged is not None:
                watch.charged.usage = StreamUsage(body)
            return await _streamed(services, route, call, watch)
        return await _whole(services, route, call, watch)
    except errors.OstinatoError as e:
        watch.fail(e)
        raise
    except asyncio.CancelledError:
        watch.end(CLIENT_GONE)
        raise
    except Exception:
        watch.end(errors.OstinatoError.code)
        raise


async def ask(services: Services, route: Route, call: EngineCall, terms: RequestTerms) -> EngineReply:
    """The engine's whole answer. Errors: Overloaded, Late, TimedOut, and whatever the engine's status
    means."""
    limit_s = services.settings.request_timeout_s
    try:
        with TimeLimit(limit_s):
            reply = await services.engines.call(route.host, call, terms)
    except TimeoutError as e:
        raise _timed_out(limit_s) from e
    if reply.status >= 300:
        raise from_engine(reply.status, reply.body, call.grammar)
    return reply


async def _whole(services: Services, route: Route, call: EngineCall, watch: Watch) -> Response:
    reply = await ask(services, route, call, watch.terms)
    if watch.charged is not None:
        watch.charged.whole(reply.body)
    watch.end("ok")
    return WholeAnswer(reply)


async def _streamed(services: Services, route: Route, call: EngineCall, watch: Watch) -> Response:
    items = services.engines.stream(route.host, call, watch.terms)
    limit_s = services.settings.request_timeout_s
    first: bytes | None = None
    try:
        async with asyncio.timeout(limit_s):
            head = await anext(items, None)
            if not isinstance(head, EngineHead):
                raise errors.EngineFailed("the engine's answer did not start with its head")
            if head.status >= 300:
                rest = [part async for part in items if isinstance(part, bytes)]
                raise from_engine(head.status, b"".join(rest), call.grammar)
            if watch.terms.dropped_after_s is not None:  # it may yet be dropped, which is to have a status
                async for item in items:
                    watch.chunk(item)
                    first = _checked(item, call.grammar)
                    break
    except BaseException as e:
        await items.aclose()
        if isinstance(e, TimeoutError):
            raise _timed_out(limit_s) from e
        raise

    async def close() -> None:
        await items.aclose()
        watch.end(CLIENT_GONE)

    def cut() -> None:
        log.info("a client of '%s' read nothing for %g s and was cut off", watch.model, write_s)
        watch.end(CUT, by_client=True)

    write_s = services.settings.stream_write_s
    chunks = _chunks(items, first, watch, limit_s, call.grammar)
    return ClosingStream(chunks, close, head.content_type, cut, write_s)


async def _chunks(
    items: AsyncGenerator[EngineHead | bytes, None],
    first: bytes | None,
    watch: Watch,
    limit_s: float,
    grammar: str,
) -> AsyncGenerator[bytes, None]:
    """The engine's chunks, of which `first` has come (None: none has); what goes wrong on the way is the last
    of them, as an error event."""
    code = CLIENT_GONE
    try:
        with TimeLimit(limit_s) as limit:
            async with contextlib.aclosing(items):
                if first is not None and (shown := watch.shown(first)):
                    limit.pause()
                    yield shown
                    limit.go_on()
                async for item in items:
                    watch.chunk(item)
                    if not (piece := watch.shown(_checked(item, grammar))):
                        continue
                    limit.pause()  # how long the client takes is limited by the response
                    yield piece
                    limit.go_on()
        code = "ok"
    except TimeoutError:
        code = errors.TimedOut.code
        yield _event(_timed_out(limit_s))
    except errors.OstinatoError as e:
        code = e.code
        watch.fail(e)
        yield _event(watch.services.hide(e))
    except Exception:
        log.exception("a stream of '%s' broke", watch.model)
        code = errors.OstinatoError.code
        yield _event(errors.OstinatoError("an unexpected error; the gateway's log has its details"))
    finally:
        watch.end(code)


def _checked(item: EngineHead | bytes, grammar: str) -> bytes:
    """Errors: what an error event of the engine means."""
    if not isinstance(item, bytes):
        raise errors.EngineFailed("the engine's answer has two heads")
    if item.startswith(ERROR_EVENT):
        raise from_engine_event(item, grammar)
    return item


class WholeAnswer(Response):
    """An engine's, as it is."""

    def __init__(self, reply: EngineReply) -> None:
        self.reply = reply
        self.status_code, self.body, self.background = reply.status, reply.body, None
        self.raw_headers = [
            (b"content-length", str(len(reply.body)).encode()),
            (b"content-type", reply.content_type.encode("latin-1")),
        ]


class ClosingStream(StreamingResponse):
    """Closes its generator however the response ends, so that a lost client frees its engine slot.

    `close` is for what the generator's own `finally` would do: a client that is lost before the first
    chunk leaves a generator that never ran. `cut` is called when a chunk could not be sent for `write_s`; the
    server before us then resets the connection.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        media_type: str,
        cut: Callable[[], None] = lambda: None,
        write_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        super().__init__(content, media_type=media_type)
        self._content = content
        self._close = close
        self._cut = cut
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = WriteLimit(self._write_s, send)
        try:
            with limit:
                # At less cost than Starlette's task group.
                await unless_client_leaves(receive, self.stream_response(limit.send), scope.get(DIRECT))
        except TimeoutError:
            self._cut()
        finally:
            await self._content.aclose()
            await self._close()


def _event(error: errors.OstinatoError) -> bytes:
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"


def _timed_out(limit_s: float) -> errors.TimedOut:
    return errors.TimedOut(
        f"the request took longer than the {limit_s:g} s allowed here (OSTINATO_REQUEST_TIMEOUT_S)"
    )
