"""What each tenant asked of this gateway in the last minute, beside what it may ask."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from controlplane import errors
from controlplane.traffic import rate_limits
from controlplane.traffic.rate_limits import Bucket
from controlplane.traffic.tenants import Tenant

REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"


@dataclass
class Charge:
    """Tokens that a request was charged; `settle` it once, when it is known what it used."""

    book: RateBook
    tenant: Tenant
    tokens: float
    settled: bool = False

    def settle(self, used: float) -> None:
        if not self.settled:
            self.settled = True
            self.book.settle(self.tenant, self.tokens, used)


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
