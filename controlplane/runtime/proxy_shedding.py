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
from functools import cache
from typing import Any, cast

from ray.util import metrics
from starlette.types import ASGIApp, Message, Scope

from controlplane import errors
from controlplane.gateway.tenants_book import TenantsBook
from controlplane.settings import Settings
from controlplane.traffic.load_shedding import LoadShedding
from controlplane.traffic.tenants import DEFAULT, Tenant, Tenants
from workers.server.head_limits import Headers
from workers.server.whole_bodies import Refusal, WholeBodies

log = logging.getLogger(__name__)

LOOK_S = 0.1
PROBE = "/healthz"
PROBE_S = 10.0  # one that takes longer is as late as that
NOBODY = Tenant(name="", weight=0.1)  # no tenant may have this name
BUSY = errors.Overloaded(
    "more requests come than can be passed on, and yours more than its share of them; send fewer at once or"
    " try again",
    details={"reason": "busy"},
)
_BODY = json.dumps(BUSY.body()).encode()
_STATUS = b"429 Too Many Requests"
_BEARER = b"Bearer "
# Probes, and Serve's own paths: they must say how it is.
_OPEN = frozenset({b"/healthz", b"/readyz"})
_SERVES = b"/-/"


class Shedding:
    """Of one proxy: whom it refuses, how often it looks, and what it says of it."""

    def __init__(self, settings: Settings) -> None:
        self._key = settings.api_key.encode()
        self._book = _book(settings)
        self._shedding = LoadShedding()
        self._tasks: list[asyncio.Task[None]] = []
        self._refused = 0
        self._untold: Counter[str] = Counter()

    def begin(self, loop: asyncio.AbstractEventLoop, app: ASGIApp) -> None:
        """Once, when the proxy has its first connection. `app` is what requests are passed on to."""
        if not self._tasks:
            self._tasks.append(loop.create_task(self._look(app)))
            if self._book is not None:
                self._tasks.append(loop.create_task(self._book.keep_fresh()))

    def retry_s(self, path: bytes, headers: Headers, now_s: float) -> float | None:
        """None: pass the request on; else when to try again."""
        if path in _OPEN or path.startswith(_SERVES):
            return None
        tenant = self.tenant_of(headers)
        after_s = self._shedding.arrive(tenant.name, tenant.weight, now_s)
        if after_s is not None:
            self._refused += 1
            self._untold[tenant.name] += 1
        return after_s

    def tenant_of(self, headers: Headers) -> Tenant:
        if not self._key:
            return DEFAULT
        given = next((value for name, value in headers if name == b"authorization"), b"")
        key = given.removeprefix(_BEARER)
        tenants = Tenants() if self._book is None else self._book.tenants
        if hmac.compare_digest(key, self._key):
            return tenants.installation
        return tenants.of_key(key) or NOBODY

    async def _look(self, app: ASGIApp) -> None:
        """Until the proxy ends."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            late_s = await probed_s(app, due_s) if self._shedding.is_crowded else 0.0
            before = self._shedding.budget_per_s
            self._shedding.look(late_s, loop.time())
            try:
                self._tell(before, self._shedding.budget_per_s)
            except Exception:  # who counts must not end what protects
                log.exception("what the proxy refused could not be counted")

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
        for name, number in untold.items():
            _counter().inc(number, tags={"tenant": name or "unknown"})


async def probed_s(app: ASGIApp, since_s: float) -> float:
    """How long the smallest request takes that is due since then. One that fails took no time: a gateway that
    is away is not a crowd's affair."""
    loop, answered = asyncio.get_running_loop(), asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]
    statuses: list[int] = []

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    try:
        async with asyncio.timeout(PROBE_S):
            await app(_probe_scope(), receive, send)
    except TimeoutError:
        return PROBE_S
    except Exception:
        log.debug("a look at the path failed", exc_info=True)
        return 0.0
    finally:
        answered.set()
    return loop.time() - since_s if statuses == [200] else 0.0


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
        log.error("%s; until this proxy starts again its tenants are one to it", e)
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
        self.shedding.begin(self.loop, cast(ASGIApp, self.app))

    def refusal(self, headers: Headers) -> Refusal | None:
        after_s = self.shedding.retry_s(self.url, headers, self.loop.time())
        if after_s is None:
            return None
        return Refusal(_STATUS, _BODY, ((b"retry-after", b"%d" % math.ceil(after_s)),))


def shedding_connections() -> type[Any]:
    SheddingConnection.shedding = Shedding(Settings())
    return SheddingConnection
