"""What each tenant used in the last minute, compared to its quota."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from controlplane import errors
from controlplane.gateway.rate_sharing import EXCHANGE_S, Key, Others, RateReport, Share
from controlplane.gateway.stream_events import NamedUsage, counted_in
from controlplane.gateway.stream_usage import StreamUsage
from controlplane.traffic import rate_limits
from controlplane.traffic.body_bounds import SMALL_BYTES
from controlplane.traffic.endpoints import Format
from controlplane.traffic.rate_limits import Bucket
from controlplane.traffic.tenants import Tenant

_TOTAL = re.compile(rb'"total_tokens":\s*(\d+)')
LARGE_BODY_BYTES = 256 << 20  # bytes of larger bodies that a gateway reads per tenant and minute
# Events of a stream without a token: one at its beginning or with the reason of its end, and the last one.
_OTHER_EVENTS = 2
_TAIL_BYTES = 4096
REQUESTS, TOKENS, BYTES = "requests_per_minute", "tokens_per_minute", "bytes_of_large_bodies_per_minute"


@dataclass
class Charge:
    """Tokens that a request was charged, until its actual use is known; only the first report of that
    counts."""

    book: RateBook
    tenant: Tenant
    tokens: float
    settled: bool = False
    format: Format = Format.OPENAI
    usage: StreamUsage | NamedUsage | None = None
    events: int = 0
    end: bytes = b""

    def saw(self, piece: bytes) -> None:
        """Note one of a stream's pieces, in their order."""
        self.events += max(1, piece.count(b"\n\n"))
        self.end = self.end[-_TAIL_BYTES:] + piece

    def streamed(self, prompt_tokens: int) -> None:
        """The stream ended or was cut: it cost what the engine reported, else a token for each event."""
        counted = None if self.usage is None else self.usage.tokens
        self.settle(
            counted or _said(self.end, self.format) or prompt_tokens + max(0, self.events - _OTHER_EVENTS)
        )

    def whole(self, body: bytes) -> None:
        """The answer was not streamed; without a report of its cost it cost what was charged."""
        self.settle(_said(body[-_TAIL_BYTES:], self.format) or self.tokens)

    def settle(self, used: float) -> None:
        if not self.settled:
            self.settled = True
            self.book.settle(self.tenant, self.tokens, used)


def _said(end: bytes, written: Format) -> int | None:
    """Tokens of prompt and answer as the engine counted them; text of the model is escaped. A message's calls
    of tools are not, so only the last counts in it are the engine's."""
    if written is Format.ANTHROPIC:
        counted = counted_in(end)
        return sum(counted.values()) if len(counted) == 2 else None
    said = _TOTAL.findall(end)
    return int(said[-1]) if said else None


class RateBook:
    """Buckets by tenant's name; a tenant without quotas has none, and costs nothing. If there are other
    gateways, this one spends only its share of the rest until it hears from them (`rate_sharing`)."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, large_body_bytes: float = math.inf
    ) -> None:
        """`large_body_bytes`: the bytes of large bodies that any tenant may send per minute."""
        self._clock = clock
        self._buckets: dict[Key, Bucket] = {}
        self._limits: dict[Key, float] = {}
        self._name = secrets.token_hex(8)
        self._spent: dict[Key, float] = {}
        self._others = Others()
        self._shares: dict[Key, Share] = {}
        self._large_body_bytes = large_body_bytes

    def request(self, tenant: Tenant) -> None:
        """Count a request. Errors: RateLimited."""
        if (limit := tenant.quota.requests_per_minute) is not None:
            self._take(tenant, REQUESTS, limit, 1.0)

    def body(self, tenant: Tenant, size_bytes: int) -> None:
        """Count a large body, because reading it delays other requests. Errors: RateLimited."""
        if size_bytes > SMALL_BYTES and self._large_body_bytes != math.inf:
            self._take(tenant, BYTES, self._large_body_bytes, size_bytes)

    def charge(self, tenant: Tenant, tokens: int) -> Charge | None:
        """Take the most tokens that a request may use; None without a quota. Errors: RateLimited."""
        if (limit := tenant.quota.tokens_per_minute) is None:
            return None
        self._take(tenant, TOKENS, limit, tokens)
        return Charge(self, tenant, tokens)

    def settle(self, tenant: Tenant, taken: float, used: float) -> None:
        limit, key = tenant.quota.tokens_per_minute, (tenant.name, TOKENS)
        if limit is not None and key in self._buckets:
            now = rate_limits.filled(self._buckets[key], limit, self._clock())
            self._buckets[key] = rate_limits.settle(now, limit, taken, used)
            self._spent[key] = self._spent.get(key, 0.0) + used - taken

    def report(self) -> RateReport:
        """The report to the other gateways."""
        return RateReport(self._name, dict(self._spent), self._levels())

    def hear(self, reports: Iterable[RateReport]) -> None:
        """Process the reports of all gateways, including this one."""
        others = [report for report in reports if report.book != self._name]
        levels, now_s = self._others.hear(others, self._levels()), self._clock()
        self._buckets = {key: Bucket(level, now_s) for key, level in levels.items()}
        self._shares = {}

    def _levels(self) -> dict[Key, float]:
        now_s = self._clock()
        return {
            key: rate_limits.filled(bucket, self._limits.get(key, bucket.level), now_s).level
            for key, bucket in self._buckets.items()
        }

    def _share_of(self, bucket: Bucket) -> Share:
        """This gateway's share of a bucket; without other gateways, all of it."""
        return Share(bucket.level / (1 + self._others.count) if self._others.count else math.inf)

    def _take(self, tenant: Tenant, what: str, limit: float, amount: float) -> None:
        now_s, key = self._clock(), (tenant.name, what)
        bucket = self._buckets.get(key) or rate_limits.full(limit, now_s)
        self._limits[key] = limit
        share = self._shares.get(key) or self._share_of(rate_limits.filled(bucket, limit, now_s))
        if share.allows(amount):
            self._buckets[key], wait_s = rate_limits.take(bucket, limit, amount, now_s)
        else:
            self._buckets[key], wait_s = bucket, EXCHANGE_S
        if wait_s == 0:
            self._spent[key] = self._spent.get(key, 0.0) + amount
            self._shares[key] = share.after(amount)
        if wait_s > 0:
            unit = what.partition("_")[0]
            raise errors.RateLimited(
                f"tenant '{tenant.name}' has reached its limit of {limit:,.10g} {unit} a minute; "
                "try again later, or ask an administrator to raise the quota",
                details={"reason": what},
                retry_after_s=math.ceil(wait_s),
            )
