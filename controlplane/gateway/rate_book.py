"""What each tenant asked of this gateway in the last minute, beside what it may ask."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from controlplane import errors
from controlplane.traffic import rate_limits
from controlplane.traffic.rate_limits import Bucket
from controlplane.traffic.tenants import Tenant

_USAGE = re.compile(rb'"total_tokens":\s*(\d+)')
# Of a stream's events one says that it begins or why it ends, and one that it has ended.
_OTHER_EVENTS = 2
_TAIL_BYTES = 4096
REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"


@dataclass
class Charge:
    """Tokens that a request was charged, until it is known what it used: the first word on that counts."""

    book: RateBook
    tenant: Tenant
    tokens: float
    settled: bool = False
    events: int = 0
    end: bytes = b""

    def saw(self, piece: bytes) -> None:
        """One of a stream's pieces, in their order."""
        self.events += max(1, piece.count(b"\n\n"))
        self.end = self.end[-_TAIL_BYTES:] + piece

    def streamed(self, prompt_tokens: int) -> None:
        """The stream is over: it cost what the engine says, or its prompt and a token for each event."""
        self.settle(_said(self.end) or prompt_tokens + max(0, self.events - _OTHER_EVENTS))

    def whole(self, body: bytes) -> None:
        """The answer came whole; without a word of its cost it cost what was charged."""
        self.settle(_said(body[-_TAIL_BYTES:]) or self.tokens)

    def settle(self, used: float) -> None:
        if not self.settled:
            self.settled = True
            self.book.settle(self.tenant, self.tokens, used)


def _said(end: bytes) -> int | None:
    """Tokens of the prompt and the answer, as the engine counted them; what models write is escaped."""
    said = _USAGE.findall(end)
    return int(said[-1]) if said else None


class RateBook:
    """Buckets by tenant's name; a tenant without quotas has none, and costs nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def request(self, tenant: Tenant) -> None:
        """Count one. Errors: RateLimited."""
        if (limit := tenant.quota.requests_per_minute) is not None:
            self._take(tenant, REQUESTS, limit, 1.0)

    def charge(self, tenant: Tenant, tokens: int) -> Charge | None:
        """Take as many as a request may use at most; None where nobody counts. Errors: RateLimited."""
        if (limit := tenant.quota.tokens_per_minute) is None:
            return None
        self._take(tenant, TOKENS, limit, tokens)
        return Charge(self, tenant, tokens)

    def settle(self, tenant: Tenant, taken: float, used: float) -> None:
        limit, key = tenant.quota.tokens_per_minute, (tenant.name, TOKENS)
        if limit is not None and key in self._buckets:
            now = rate_limits.filled(self._buckets[key], limit, self._clock())
            self._buckets[key] = rate_limits.settle(now, limit, taken, used)

    def _take(self, tenant: Tenant, what: str, limit: float, amount: float) -> None:
        now_s, key = self._clock(), (tenant.name, what)
        bucket = self._buckets.get(key) or rate_limits.full(limit, now_s)
        self._buckets[key], wait_s = rate_limits.take(bucket, limit, amount, now_s)
        if wait_s > 0:
            unit = what.partition("_")[0]
            raise errors.RateLimited(
                f"tenant '{tenant.name}' may ask for {limit:g} {unit} a minute of a gateway; "
                "try again later, or have its quota raised",
                details={"reason": what},
                retry_after_s=math.ceil(wait_s),
            )
