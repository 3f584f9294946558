"""The checks before every route: an API key (if one is set) and a limit on the request's size.

The installation's key allows every call. A tenant's key allows the calls of its role, and identifies the
tenant.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api.access import OPEN_PATHS, require_role
from controlplane.api.error_handlers import respond
from controlplane.traffic.body_bounds import check_parts
from controlplane.traffic.endpoints import ENDPOINTS
from controlplane.traffic.tenants import INSTALLATION, ONE_TENANT, Caller, Tenant, Tenants, shown
from workers.asgi import DIRECT

_CALLER = "ostinato.caller"
_BEARER = b"bearer"
_ANTHROPIC_KEY = b"x-api-key"


def caller_of(scope: Scope) -> Caller:
    """The caller of a request that passed the guard."""
    caller = scope.get(_CALLER, INSTALLATION)
    assert isinstance(caller, Caller)
    return caller


def known_caller(scope: Scope) -> Caller | None:
    """The caller of a request, even if the guard refused it; None: unknown."""
    found: Caller | None = scope.get(_CALLER)
    return found


def tenant_of(scope: Scope) -> Tenant:
    """The tenant of a request that passed the guard."""
    return caller_of(scope).tenant


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a request brought, in OpenAI's header or in Anthropic's; empty: none."""
    return key_in(headers.get(b"authorization", b"")) or headers.get(_ANTHROPIC_KEY, b"").strip()


def key_in(given: bytes) -> bytes:
    """The key of an Authorization header, whose scheme may be written in any case; empty: none."""
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == _BEARER else b""


class BodyBounds(NamedTuple):
    """Limits of a request's body: its size, its number of texts, lists and objects, and its time to
    arrive."""

    bytes: int
    parts: int
    timeout_s: float


class Guard:
    """Pure ASGI, so that streaming and disconnects pass through untouched."""

    def __init__(
        self,
        app: ASGIApp,
        api_key: str,
        bodies: BodyBounds,
        tenants: Callable[[], Tenants] = lambda: ONE_TENANT,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        """`tenants` is called for every request. `hosts`: the accepted host names, without ports; empty:
        any. `origins`: sites whose pages may send requests in addition to `hosts`; `*`: all."""
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._body_timeout_s = bodies.timeout_s
        self._tenants = tenants
        self._key = api_key.encode()
        self._own_digits = shown(api_key.encode())
        self._limit, self._max_parts = bodies.bytes, bodies.parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check(scope, headers)
        except errors.OstinatoError as e:
            await respond(e, scope["path"])(scope, receive, send)
            return
        bounded = b"content-length" in headers and b"transfer-encoding" not in headers
        if not bounded:
            receive = self._counted(receive)
            scope.pop(DIRECT, None)  # its body would not be counted
        # `inference/fast_path.py` reads bodies of inference calls at once and bounds them at less cost.
        if scope["path"] not in ENDPOINTS:
            receive = _readable(_within(receive, self._body_timeout_s), self._max_parts)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if scope["path"] not in OPEN_PATHS:
            caller = scope[_CALLER] = self._caller(headers)
            require_role(caller.tenant, scope["method"], scope["path"])
        if self._hosts and scope["path"] not in OPEN_PATHS:
            self._check_host(headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise errors.InvalidRequest("expected Content-Length to be a number")
        if int(length) > self._limit:
            raise self._too_large(int(length))

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Check the host that a browser addresses, and the origin of its page. Errors: HostNotAllowed."""
        named = [headers.get(b"host", b"").decode("latin-1")]
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not {origin, "*"} & self._origins:
            named.append(origin.partition("://")[2])
        for name in named:
            if _without_port(name).lower() not in self._hosts:
                raise errors.HostNotAllowed(
                    f"this installation answers to the host names {', '.join(sorted(self._hosts))}, got "
                    f"{name[:200]!r}; add the name to OSTINATO_ALLOWED_HOSTS, or the page's origin to "
                    "OSTINATO_CORS_ORIGINS, or set OSTINATO_API_KEY, with which every name is allowed"
                )

    def _caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller with this key. Errors: Unauthorized for an unknown key."""
        tenants = self._tenants()
        if not self._key:
            return INSTALLATION
        key = given_key(headers)
        if hmac.compare_digest(key, self._key):
            return Caller(tenants.installation, self._own_digits)
        tenant = tenants.of_key(key) if key else None
        if tenant is None:
            raise errors.Unauthorized(
                f"expected a valid API key of this installation, got {'another key' if key else 'no key'}; "
                "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`; the key is the installation's "
                "OSTINATO_API_KEY, or a tenant's key, which an administrator makes with `ostinato keys new`"
            )
        return Caller(tenant, shown(key))

    def _too_large(self, size: int) -> errors.BodyTooLarge:
        return errors.BodyTooLarge(
            f"the body has {size} bytes or more, but at most {self._limit} are allowed "
            "(OSTINATO_MAX_BODY_BYTES)"
        )

    def _counted(self, receive: Receive) -> Receive:
        """Count the bytes of a body without a Content-Length as they arrive. Errors: BodyTooLarge."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large(seen)
            return message

        return counted


def body_too_slow(limit_s: float) -> errors.BodyTooSlow:
    return errors.BodyTooSlow(f"the body did not arrive within {limit_s:g} s")


def _within(receive: Receive, limit_s: float) -> Receive:
    """Require that a body arrives within `limit_s` of its first read. Errors: BodyTooSlow."""
    ends_s, is_whole = math.inf, limit_s == math.inf

    async def timed() -> Message:
        nonlocal ends_s, is_whole
        if is_whole:
            return await receive()
        ends_s = min(ends_s, asyncio.get_running_loop().time() + limit_s)
        try:
            async with asyncio.timeout_at(ends_s):
                message = await receive()
        except TimeoutError as e:
            raise body_too_slow(limit_s) from e
        is_whole = not message.get("more_body", False)
        return message

    return timed


def _readable(receive: Receive, most_parts: int) -> Receive:
    """Deliver a body in one message, and bound its parts so that parsing it does not block other requests.
    Errors: InvalidRequest."""
    is_first = True

    async def whole() -> Message:
        nonlocal is_first
        if not is_first:
            return await receive()
        is_first, parts = False, []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(parts)
                check_parts(body, most_parts)
                return {**message, "body": body}

    return whole


def _without_port(host: str) -> str:
    """The host of a Host header; an IPv6 address is in brackets."""
    end = host.find("]") + 1
    return host[:end] if end else host.partition(":")[0]
