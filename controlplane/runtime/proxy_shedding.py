"""Serve's proxy refuses early what it cannot pass on: `controlplane.traffic.load_shedding` at its door.

A request costs the proxy and a gateway some milliseconds; refused here, before there is a call for it, a
tenth of one. Whose it is says its key, by the tenants that gateways know. All who have no known key are one
tenant of little weight. How long the smallest request takes says one of our own, while many come.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

from ray.util import metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane import errors
from controlplane.api import request_id
from controlplane.api.middleware import key_in
from controlplane.gateway.tenants_book import TenantsBook
from controlplane.settings import Settings
from controlplane.traffic.load_shedding import UNKNOWN, LoadShedding
from controlplane.traffic.rate_limits import full, take
from controlplane.traffic.tenants import DEFAULT, Tenant
from workers.server.head_limits import Headers
from workers.server.whole_bodies import Refusal, WholeBodies

log = logging.getLogger(__name__)

LOOK_S = 0.1
PROBE = "/healthz"
PROBE_S = 10.0  # one that takes longer is given up
# Beside one that takes longer than this another is sent, and so on: one gateway may hang, which is no crowd.
ANOTHER_S, MOST_PROBES = 0.25, 4
CROWDED = frozenset({200, 408, 429, 499})  # of a probe: any other says that a gateway is not there
BOOK_S = 5.0
NOBODY = Tenant(name=UNKNOWN, weight=0.1)
BUSY = errors.Overloaded(
    "more requests come than can be passed on, and yours more than its share of them; send fewer at once or"
    " try again",
    details={"reason": "busy"},
)
_BODY = json.dumps(BUSY.body()).encode()
_STATUS = b"429 Too Many Requests"
# What says how it is: anybody may ask for it so often, and then as who has no key.
_OPEN = frozenset({b"/healthz", b"/readyz"})
OPEN_PER_MINUTE = 1200.0
_SERVES = frozenset({b"/-/healthz", b"/-/routes"})  # which no gateway sees
# The key in a scope under which its tenant's name is, until it is passed on.
_TENANT = "ostinato.tenant"


class Decision(NamedTuple):
    """`tenant`: whose answer it will be; None: it is not counted. `retry_s`: None: pass the request on; else
    it is refused, and may come again after so many seconds."""

    tenant: str | None
    retry_s: float | None


class Shedding:
    """Of one proxy: whom it refuses, how often it looks, and what it says of it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sheds = settings.proxy_sheds
        self._key = settings.api_key.encode()
        self._book = _book(settings)
        self._shedding = LoadShedding()
        self._open = full(OPEN_PER_MINUTE, 0.0)
        self._tasks: list[asyncio.Task[None]] = []
        self._counted: ASGIApp | None = None
        self._refused = 0
        self._untold: Counter[str] = Counter()
        self._is_counted = True

    def passing_on(self, loop: asyncio.AbstractEventLoop, app: ASGIApp) -> ASGIApp:
        """`app`, whose answers are counted. The proxy's first connection begins the looks."""
        if self._counted is None:
            self._tasks += (loop.create_task(self._look(app)), loop.create_task(self._keep_book()))
            self._counted = counting(app, self._answered)
        return self._counted

    def leave_out(self, name: str) -> None:
        """Of what was passed on, a request of this tenant whose answer nobody sees."""
        self._shedding.leave_out(name)

    def _answered(self, name: str, is_refusal: bool) -> None:
        """To the present one: another takes its place after an error."""
        self._shedding.answer(name, is_refusal)

    def decide(self, path: bytes, headers: Headers, now_s: float) -> Decision:
        path = path.partition(b"?")[0]
        if not self._sheds or path in _SERVES or (path in _OPEN and self._is_open(now_s)):
            return Decision(None, None)
        tenant = NOBODY if path in _OPEN else self.tenant_of(headers)
        after_s = self._shedding.arrive(tenant.name, tenant.weight, now_s)
        if after_s is not None:
            self._refused += 1
            self._untold[tenant.name] += 1
        return Decision(None if path in _OPEN else tenant.name, after_s)

    def _is_open(self, now_s: float) -> bool:
        self._open, wait_s = take(self._open, OPEN_PER_MINUTE, 1.0, now_s)
        return wait_s == 0.0

    def tenant_of(self, headers: Headers) -> Tenant:
        """As the gateways' guard has it (`controlplane.api.middleware`)."""
        if not self._key:
            return DEFAULT
        key = key_in(dict(headers).get(b"authorization", b""))
        if hmac.compare_digest(key, self._key):
            return DEFAULT if self._book is None else self._book.tenants.installation
        return (self._book.tenants.of_key(key) if self._book is not None else None) or NOBODY

    async def _keep_book(self) -> None:
        while self._book is None:
            await asyncio.sleep(BOOK_S)
            self._book = await asyncio.to_thread(_book, self._settings)
        await self._book.keep_fresh()

    async def _look(self, app: ASGIApp) -> None:
        """Until the proxy ends."""
        loop = asyncio.get_running_loop()
        probes = Probes(app)
        while True:
            due_s = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            try:
                late_s = probes.late_s()
                if self._shedding.is_crowded:
                    probes.send(due_s)
                before = self._shedding.budget_per_s
                self._shedding.look(late_s, loop.time())
                self._tell(before, self._shedding.budget_per_s)
            except Exception:  # rather nobody is refused than somebody for ever
                log.exception("the proxy cannot tell how late its requests are; it passes on all")
                self._shedding = LoadShedding()

    def _tell(self, before: float, after: float) -> None:
        if before == math.inf and after < math.inf:
            log.warning(
                "the proxy has more requests than it can pass on: it takes %.0f a second and refuses the"
                " tenants that ask for more than their share (429, details.reason busy)",
                after,
            )
        elif before < math.inf and after == math.inf:
            log.warning("the proxy passes on all requests again; it refused %d", self._refused)
            self._refused = 0
        untold, self._untold = self._untold, Counter()
        try:
            for name, number in untold.items() if self._is_counted else ():
                _counter().inc(number, tags={"tenant": name or "unknown"})
        except Exception:
            log.exception("what the proxy refuses is not counted from now on")
            self._is_counted = False


def counting(app: ASGIApp, answered: Callable[[str, bool], None]) -> ASGIApp:
    """`app`, and a call of `answered` for each answer that begins to a tenant's request: whose it is, and
    whether it says that too much was asked."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope.pop(_TENANT, None)

        async def and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered(tenant, message["status"] == 429)
            await send(message)

        await app(scope, receive, send if tenant is None else and_count)

    return counted


class Probes:
    """Of one proxy: how long the smallest request takes. In a running event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._under_way: list[Probe] = []  # in the order in which they were sent

    def late_s(self) -> float:
        """By the last that was sent of those that are answered since this was asked, or how long the first
        takes by now; 0.0: none is under way. One that others passed says nothing."""
        for number in reversed(range(len(self._under_way))):
            if self._under_way[number].is_over():
                *passed, answered = self._under_way[: number + 1]
                for probe in passed:
                    probe.give_up()
                del self._under_way[: number + 1]
                return answered.late_s()
        return self._under_way[0].late_s() if self._under_way else 0.0

    def send(self, due_s: float) -> None:
        """Another, if none is under way, or those that are take long."""
        waits_s = self._under_way[-1].late_s() if self._under_way else math.inf
        if waits_s > ANOTHER_S and len(self._under_way) < MOST_PROBES:
            self._under_way.append(Probe(self._app, due_s))


class Probe:
    """The smallest request, by the way that all go. In a running event loop."""

    def __init__(self, app: ASGIApp, since_s: float) -> None:
        """`since_s`: when it was due, by the loop's time."""
        self._loop = asyncio.get_running_loop()
        self._since_s = since_s
        self._unread: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
        self._status = 0
        self._took_s: float | None = None
        self._left = asyncio.Event()
        self._task = self._loop.create_task(self._ask(app))

    def late_s(self) -> float:
        """How long it took, or takes by now. One that failed took no time: a gateway that is away is not a
        crowd's affair."""
        return self._loop.time() - self._since_s if self._took_s is None else self._took_s

    def is_over(self) -> bool:
        """It is given up after PROBE_S."""
        if self._took_s is None and self.late_s() > PROBE_S:
            self.give_up()
            return True
        return self._took_s is not None

    def give_up(self) -> None:
        self._left.set()
        self._task.cancel()

    async def _ask(self, app: ASGIApp) -> None:
        try:
            await app(_probe_scope(), self._receive, self._send)
        except Exception:
            log.debug("a look at the path failed", exc_info=True)
        finally:
            self._left.set()
            self._took_s = self._loop.time() - self._since_s if self._status in CROWDED else 0.0

    async def _receive(self) -> Message:
        if self._unread:
            return self._unread.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]


def _probe_scope() -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": PROBE,
        "raw_path": PROBE.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }


def _book(settings: Settings) -> TenantsBook | None:
    try:
        return TenantsBook(settings)
    except ValueError as e:  # gateways do not start with it, and say so
        log.error("%s; until it can be read all tenants' keys are unknown to this proxy", e)
        return None


@cache
def _counter() -> metrics.Counter:
    """Among Ray's own metrics: the proxy has no other."""
    description = "Requests that Serve's proxy refused, by tenant: it had more than it could pass on."
    return metrics.Counter("ostinato_proxy_refused", description, tag_keys=("tenant",))


class SheddingConnection(WholeBodies):
    """Answers by itself what `shedding` refuses."""

    shedding: Shedding  # of the process, set before it listens

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = self.shedding.passing_on(self.loop, cast(ASGIApp, self.app))

    def refusal(self, headers: Headers) -> Refusal | None:
        decision = self.shedding.decide(self.url, headers, self.loop.time())
        if decision.retry_s is None:
            cast("dict[str, Any]", self.scope)[_TENANT] = decision.tenant
            return None
        retry_after = (b"retry-after", b"%d" % math.ceil(decision.retry_s))
        return Refusal(_STATUS, _BODY, (retry_after, request_id.header_of(headers)))

    def _go_on_as_websocket(self) -> None:
        """Nobody counts another protocol's answers, so its request counts neither."""
        tenant = cast("dict[str, Any]", self.scope).pop(_TENANT, None)
        if tenant is not None:
            self.shedding.leave_out(tenant)
        super()._go_on_as_websocket()


def shedding_connections() -> type[Any]:
    SheddingConnection.shedding = Shedding(Settings())
    return SheddingConnection
