"""Early refusal of requests that a gateway cannot handle in time (`controlplane.traffic.load_shedding`).

A request costs a gateway about a millisecond; an early refusal costs a tenth of that. The API key identifies
the tenant. All requests without a known key count as one tenant of little weight. The gateway measures its
lateness by its own loop: the duration of as many turns as a request needs.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api import request_id
from controlplane.api.error_formats import error_body
from controlplane.api.middleware import given_key
from controlplane.settings import Settings
from controlplane.traffic.endpoints import Format, format_of
from controlplane.traffic.load_shedding import UNKNOWN, LoadShedding
from controlplane.traffic.rate_limits import full, take
from controlplane.traffic.tenants import DEFAULT, Tenant, Tenants
from workers.asgi import DIRECT, DirectRequest

log = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]
LOOK_S = 0.1
TURNS = 4  # read, begun, answered by the engine, written
UNKNOWN_TENANT = Tenant(name=UNKNOWN, weight=0.1)
BUSY = errors.Overloaded(
    "the gateway gets more requests than it can handle, and this tenant sends more than its share; send"
    " fewer requests at once, or try again",
    details={"reason": "busy"},
)
_BODIES = {of: json.dumps(error_body(BUSY, of)).encode() for of in Format}
# Any client may send this number of probes. Further probes count as requests without a known key.
_OPEN = frozenset({"/healthz", "/readyz"})
OPEN_PER_MINUTE = 1200.0
_SERVES = frozenset({"/-/healthz", "/-/routes"})
# The scope's key for the name of the request's tenant, until the request is passed on. None: the request is
# not counted.
TENANT = "ostinato.tenant"


class Decision(NamedTuple):
    """`tenant`: the tenant whose answer is counted; None: not counted. `retry_s`: None: pass the request
    on; else refuse it, and let the client retry after this time."""

    tenant: str | None
    retry_s: float | None


class Refusal(NamedTuple):
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class EarlyRefusal:
    """One gateway's decision about each request. `refused` counts refusals by the tenant's name."""

    def __init__(
        self, settings: Settings, tenants: Callable[[], Tenants], refused: Callable[[str, int], None]
    ) -> None:
        self._sheds = settings.sheds_load
        self._key = settings.api_key.encode()
        self._tenants = tenants
        self._count = refused
        self._shedding = LoadShedding()
        self._open = full(OPEN_PER_MINUTE, 0.0)
        self._refused = 0
        self._untold: Counter[str] = Counter()

    def of(self, scope: Scope, now_s: float) -> Refusal | None:
        """The answer to a refused request. None: pass the request on; `scope` then names its tenant."""
        decision = self.decide(scope["path"], scope["headers"], now_s)
        if decision.retry_s is None:
            scope[TENANT] = decision.tenant
            return None
        body = _BODIES[format_of(scope["path"])]
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % math.ceil(decision.retry_s)),
            request_id.header_of(scope["headers"]),
        ]
        return Refusal(errors.Overloaded.status, headers, b"" if scope["method"] == "HEAD" else body)

    def answered(self, name: str, is_refusal: bool) -> None:
        """An answer to a request of this tenant begins."""
        self._shedding.answer(name, is_refusal)

    def decide(self, path: str, headers: Headers, now_s: float) -> Decision:
        if not self._sheds or path in _SERVES or (path in _OPEN and self._is_open(now_s)):
            return Decision(None, None)
        tenant = UNKNOWN_TENANT if path in _OPEN else self.tenant_of(headers)
        after_s = self._shedding.arrive(tenant.name, tenant.weight, now_s)
        if after_s is not None:
            self._refused += 1
            self._untold[tenant.name] += 1
        return Decision(None if path in _OPEN else tenant.name, after_s)

    def _is_open(self, now_s: float) -> bool:
        self._open, wait_s = take(self._open, OPEN_PER_MINUTE, 1.0, now_s)
        return wait_s == 0.0

    def tenant_of(self, headers: Headers) -> Tenant:
        """The request's tenant, by the guard's rules (`controlplane.api.middleware`)."""
        if not self._key:
            return DEFAULT
        key = given_key(dict(headers))
        tenants = self._tenants()
        if hmac.compare_digest(key, self._key):
            return tenants.installation
        return tenants.of_key(key) or UNKNOWN_TENANT

    async def watch(self) -> None:
        """Measure the lateness and adapt the budget, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            late_s = await lateness_s(loop.time() + LOOK_S)
            before = self._shedding.budget_per_s
            self._shedding.look(late_s, loop.time())
            self._tell(before, self._shedding.budget_per_s)

    def _tell(self, before: float, after: float) -> None:
        if before == math.inf and after < math.inf:
            log.warning(
                "the gateway gets more requests than it can handle: it accepts %.0f requests a second and "
                "refuses requests of tenants above their share (429, details.reason busy)",
                after,
            )
        elif before < math.inf and after == math.inf:
            log.warning("the gateway accepts all requests again; it refused %d requests", self._refused)
            self._refused = 0
        untold, self._untold = self._untold, Counter()
        for name, number in untold.items():
            self._count(name or "unknown", number)


async def lateness_s(due_s: float) -> float:
    """The delay after `due_s`, in the loop's time, with which a request that came then would be answered."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(due_s - loop.time())
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return max(0.0, loop.time() - due_s)


class EarlyRefusals:
    """Pure ASGI around a server's application. Counts its answers by tenant, and refuses requests that the
    server itself has not checked."""

    def __init__(self, app: ASGIApp, early: EarlyRefusal) -> None:
        self._app = app
        self._early = early

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if TENANT not in scope:
            refusal = self._early.of(scope, asyncio.get_running_loop().time())
            if refusal is not None:
                await send(
                    {"type": "http.response.start", "status": refusal.status, "headers": refusal.headers}
                )
                await send({"type": "http.response.body", "body": refusal.body})
                return
        tenant = scope.pop(TENANT)
        if tenant is None:
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._early.answered(tenant, message["status"] == errors.Overloaded.status)
            await send(message)

        direct: DirectRequest | None = scope.get(DIRECT)
        if direct is not None:
            scope[DIRECT] = _Counted(direct, self._early, tenant)
        await self._app(scope, receive, counting)


class _Counted:
    """A `DirectRequest` whose answer is counted."""

    def __init__(self, direct: DirectRequest, early: EarlyRefusal, tenant: str) -> None:
        self.call, self.body = direct.call, direct.body
        self._answer = direct.answer
        self._early = early
        self._tenant = tenant

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        if not self._answer(status, headers, body):
            return False
        self._early.answered(self._tenant, status == errors.Overloaded.status)
        return True
