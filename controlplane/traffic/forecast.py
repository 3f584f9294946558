"""When a new request in the queue would have its first token. Pure.

A forecast is a sum: how long the request waits in the queue, by the queue's speed; the recent error of such
forecasts, including requests that still wait and are first of their tenants (Ibrahim and Whitt, 2009); and
the recent time from a request's turn to its first token. The last two are quantiles of observations, so no
distribution is assumed (conformal prediction; Vovk, Gammerman and Shafer, 2005). A tenant above its share
gets a high quantile of waits. A tenant within its share is refused only if its request would probably be
late.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from enum import Enum
from typing import NamedTuple

from controlplane.state.terms import Priority
from controlplane.traffic.request_queue import RequestQueue, Waiting
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant

# Observations fade with this time constant, except the last few; fewer than ENOUGH of them are ignored.
MEMORY_S = 10.0
ENOUGH = 8
# If many new requests are refused, there are few observations. So old ones are forgotten; otherwise requests
# would be refused forever.
LAST, FEW = 200, 100
FORGET_S = 30.0
# Higher priorities of a tenant crowd out its lower ones under two conditions on recent tokens. They asked for
# more than CROWDED times what the tenant was admitted in all. And more than a CROWDING part of the admitted
# tokens, and at least CROWDING_TOKENS, were theirs.
CROWDED, CROWDING = 1.1, 0.6
CROWDING_TOKENS = 256
# This part of recent first tokens came as soon after their turns as forecast, for all tenants. A variant that
# is not loaded yet takes seconds, and no request is refused because of these.
FIRST_QUANTILE = 0.9
# The error of a wait grows with the wait, from the error of a wait of this length.
SHORTEST_SCALE_S = 0.5
# The assumed relative error of a wait before any observation.
UNSEEN = 0.25


class QueueSpeed:
    """Estimated tokens that leave a queue each second while requests wait in it.

    Old observations fade with `memory_s`; in a slow queue at most one part in `enough` fades at a time.
    `now_s` never goes back.
    """

    def __init__(self, memory_s: float = MEMORY_S, enough: int = ENOUGH) -> None:
        self._memory_s = memory_s
        self._enough = enough
        self._tokens = self._seconds = self._faded_turns = 0.0
        self._turns = 0
        self._last_s: float | None = None
        self._turned_s = -math.inf

    def begin(self, now_s: float) -> None:
        """The queue begins to move, or its first request begins to wait."""
        self._last_s = now_s

    def stood_s(self, now_s: float) -> float | None:
        """Seconds since the last request left the queue, or since it began; None: it never began."""
        return None if self._last_s is None else now_s - self._last_s

    def moved(self, tokens: int, now_s: float) -> None:
        """A request of `tokens` left the queue, in which requests waited since the last one left."""
        self._turned_s = now_s
        if self._last_s is None:
            self._last_s = now_s
            return
        took_s = now_s - self._last_s
        kept = max(math.exp(-took_s / self._memory_s), 1 - 1 / self._enough)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + took_s
        self._faded_turns = self._faded_turns * kept + 1
        self._turns += 1
        self._last_s = now_s

    def wait_s(self, tokens: float) -> float | None:
        """Seconds until `tokens` tokens have left; None: too little is known."""
        if self._turns < self._enough or self._tokens <= 0:
            return None
        return tokens * self._seconds / self._tokens

    def turn_s(self, now_s: float) -> float:
        """Seconds from one turn to the next; 0.0: unknown, or too long ago."""
        if self._turns < self._enough or self._turned_s < now_s - FORGET_S:
            return 0.0
        return self._seconds / self._faded_turns


class Fading:
    """A sum that fades with FORGET_S."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since_s = 0.0  # the time of the last addition

    def add(self, value: float, now_s: float) -> None:
        self._sum = self.at(now_s) + value
        self._since_s = now_s

    def at(self, now_s: float) -> float:
        return self._sum * math.exp((self._since_s - now_s) / FORGET_S)


class ShareUse(Enum):
    """A tenant's use of its share. The value is the part of recent waits that were within the forecast."""

    ALONE = 0.9
    WITHIN = 0.5
    ABOVE = 0.96


class _Asked:
    """Tokens of a tenant's requests of one priority."""

    def __init__(self) -> None:
        self.asked, self.admitted = Fading(), Fading()
        self.last_s = -math.inf


class _Demand:
    """What a tenant asked for recently, and what was admitted of it."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.last_s = -math.inf
        self._of = {priority: _Asked() for priority in Priority}

    def ask(self, terms: RequestTerms, now_s: float) -> None:
        self.tenant, self.last_s = terms.tenant, now_s
        of = self._of[terms.priority]
        of.last_s = now_s
        of.asked.add(terms.tokens, now_s)

    def admit(self, terms: RequestTerms, now_s: float) -> None:
        self._of[terms.priority].admitted.add(terms.tokens, now_s)

    def admitted(self, now_s: float) -> float:
        return sum(of.admitted.at(now_s) for of in self._of.values())

    def is_crowded_out(self, priority: Priority, now_s: float, aging_s: float) -> bool:
        """Whether higher priorities take most of what is admitted and ask for more than that. One of them
        must have asked within `aging_s`."""
        above = [of for p, of in self._of.items() if p.level > priority.level]
        if all(of.last_s < now_s - aging_s for of in above):
            return False
        asked = sum(of.asked.at(now_s) for of in above)
        admitted = sum(of.admitted.at(now_s) for of in above)
        in_all = self.admitted(now_s)
        return admitted > max(CROWDING_TOKENS, CROWDING * in_all) and asked > CROWDED * in_all


class Shares:
    """Which tenants were recently admitted for at most their weight's share of all admitted tokens, over all
    priorities. Refused requests do not count: otherwise a client that retries would be above its share for
    that alone. Also which tenants' lower priorities are crowded out by their own higher ones.

    A tenant that asked for nothing during FORGET_S is forgotten, and has no share.
    """

    def __init__(self) -> None:
        self._went = Fading()
        self._tenants: dict[str, _Demand] = {}  # ordered by the last request, the latest last
        self._weight = 0.0

    def asked(self, terms: RequestTerms, now_s: float) -> None:
        tenant = terms.tenant
        known = self._tenants.pop(tenant.name, None)
        if known is not None and known.last_s < now_s - FORGET_S:
            known = None
        changed = known is None or known.tenant.weight != tenant.weight
        self._tenants[tenant.name] = demand = known or _Demand(tenant)
        demand.ask(terms, now_s)
        while self._tenants[first := next(iter(self._tenants))].last_s < now_s - FORGET_S:
            del self._tenants[first]
            changed = True
        if changed:
            self._weight = sum(each.tenant.weight for each in self._tenants.values())

    def joined(self, terms: RequestTerms, now_s: float) -> None:
        """A request of a tenant was admitted to the queue."""
        if terms.tenant.name not in self._tenants:
            self.asked(terms, now_s)
        self._tenants[terms.tenant.name].admit(terms, now_s)

    def went(self, tokens: int, now_s: float) -> None:
        self._went.add(tokens, now_s)

    def use_of(self, tenant: Tenant, now_s: float) -> ShareUse:
        """How a tenant that has asked uses its share."""
        if len(self._tenants) < 2:
            return ShareUse.ALONE
        joined = self._tenants[tenant.name].admitted(now_s)
        is_within = joined * self._weight <= self._went.at(now_s) * tenant.weight
        return ShareUse.WITHIN if is_within else ShareUse.ABOVE

    def is_crowded_out(self, terms: RequestTerms, now_s: float, aging_s: float) -> bool:
        """Whether higher priorities of its tenant crowd a request out, until it has waited `aging_s`."""
        demand = self._tenants.get(terms.tenant.name)
        return demand is not None and demand.is_crowded_out(terms.priority, now_s, aging_s)


class _Observed(NamedTuple):
    at_s: float
    value: float


class LastSeen:
    """The last observations of a quantity: at most LAST, none older than FORGET_S."""

    def __init__(self) -> None:
        self._seen: deque[_Observed] = deque()
        self._sorted: list[float] = []

    def add(self, value: float, now_s: float) -> None:
        if len(self._seen) == LAST:
            self._forget()
        self._seen.append(_Observed(now_s, value))
        insort(self._sorted, value)

    def quantile(self, share: float, unseen: float, now_s: float) -> float:
        """The least value that is at least as large as this share of the observations. If there are fewer
        than FEW, the missing ones count as `unseen`, so a single outlier does not decide."""
        while self._seen and self._seen[0].at_s < now_s - FORGET_S:
            self._forget()
        values, lacking = self._sorted, FEW - len(self._sorted)
        index = math.ceil(share * max(len(values), FEW)) - 1
        if lacking > 0:
            values = sorted([*values, *[unseen] * lacking])
        return values[index]

    def _forget(self) -> None:
        del self._sorted[bisect_left(self._sorted, self._seen.popleft().value)]


class _Pool:
    """Requests of one priority whose tenants use their shares alike: how many wait, their pace, and the
    errors of their waits."""

    def __init__(self) -> None:
        self.count = 0
        self.speed = QueueSpeed()
        self.off = LastSeen()


class Forecast:
    """The forecast of one queue. Later requests may go before a new one: those of a higher priority, and
    those of tenants with less than their share. They are not in the queue yet, but they delayed
    earlier requests of the same pool. So the pool's own pace counts, too.
    """

    def __init__(self) -> None:
        self._whole = QueueSpeed()
        self._pools = {(use, priority): _Pool() for use in ShareUse for priority in Priority}
        self._pool_of: dict[int, _Pool] = {}  # of waiting requests, by number
        self._said: dict[int, tuple[float, float]] = {}  # by number: since when, the forecast wait
        self._first_s = LastSeen()
        self._shares = Shares()
        # For each tenant, the priority of its last turn during which no higher priority of its own waited.
        self._served: dict[str, Priority] = {}

    def asked(self, terms: RequestTerms, now_s: float) -> None:
        """A new request has arrived; it may be refused."""
        self._shares.asked(terms, now_s)

    def ttft_s(
        self, queue: RequestQueue, terms: RequestTerms, wait_s: float | None, now_s: float
    ) -> float | None:
        """The forecast TTFT of a new request that waits `wait_s`; None: too little is known."""
        if wait_s is None:
            return None
        use, off = self._shares.use_of(terms.tenant, now_s), UNSEEN
        if not self._is_next(queue, terms):
            first = queue.first_of(terms) if use is ShareUse.ABOVE else None
            off = max(
                0.0,
                self._pools[use, terms.priority].off.quantile(use.value, UNSEEN, now_s),
                0.0 if first is None else self._off_by(first.number, now_s),
            )
        wait_s += off * (wait_s + SHORTEST_SCALE_S)
        if self._shares.is_crowded_out(terms, now_s, queue.limits.aging_s):
            wait_s = max(wait_s, queue.limits.aging_s)
        return wait_s + self._first_s.quantile(FIRST_QUANTILE, 0.0, now_s)

    def wait_s(self, queue: RequestQueue, terms: RequestTerms, now_s: float) -> float | None:
        """The wait in the queue at the current paces; None: too little is known."""
        use = self._shares.use_of(terms.tenant, now_s)
        pool = self._pools[use, terms.priority]
        known = [self._whole.wait_s(queue.tokens_before(terms))]
        wait_s = pool.speed.wait_s(queue.tokens_of_priority_before(terms))
        if wait_s is not None:
            passes = use is ShareUse.ALONE or self._is_next(queue, terms)
            known.append(wait_s + (0.0 if passes else pool.speed.turn_s(now_s)))
            known.append(pool.speed.stood_s(now_s) if pool.count else None)
        return max((wait_s for wait_s in known if wait_s is not None), default=None)

    def turn_s(self, terms: RequestTerms) -> float | None:
        """How long the whole queue takes to move by a request's tokens."""
        return self._whole.wait_s(terms.tokens)

    def begin(self, now_s: float) -> None:
        """Workers exist again: waits are counted from now on, and forecasts are forgotten."""
        self._said.clear()
        self._shares = Shares()
        for speed in (self._whole, *(pool.speed for pool in self._pools.values())):
            speed.begin(now_s)

    def joined(self, queue: RequestQueue, waiting: Waiting, wait_s: float | None, now_s: float) -> None:
        """`waiting` has just joined `queue`, after `asked`; `wait_s` is the forecast of its wait."""
        if len(queue) == 1:
            self._whole.begin(now_s)
        terms = waiting.terms
        pool = self._pools[self._shares.use_of(terms.tenant, now_s), terms.priority]
        self._pool_of[waiting.number] = pool
        pool.count += 1
        if pool.count == 1:
            pool.speed.begin(now_s)
        if wait_s is not None:
            self._said[waiting.number] = now_s, wait_s
        self._shares.joined(terms, now_s)

    def moved(self, queue: RequestQueue, waiting: Waiting, now_s: float) -> None:
        """The request has had its turn, and has left `queue`."""
        terms = waiting.terms
        if not queue.waits_above(terms):
            self._served[terms.tenant.name] = terms.priority
        self._shares.went(terms.tokens, now_s)
        self._whole.moved(terms.tokens, now_s)
        self._pool_of[waiting.number].speed.moved(terms.tokens, now_s)
        self.waited(waiting, now_s)

    def waited(self, waiting: Waiting, now_s: float) -> None:
        """The request has left the queue: for its turn, or because it was late and would have waited
        longer."""
        if waiting.number in self._said:
            self._pool_of[waiting.number].off.add(self._off_by(waiting.number, now_s), now_s)
        self.left(waiting.number)

    def left(self, number: int) -> None:
        """The request left the queue without a turn, cancelled or displaced; its wait is no observation."""
        self._said.pop(number, None)
        if (pool := self._pool_of.pop(number, None)) is not None:
            pool.count -= 1

    def answered(self, took_s: float, now_s: float) -> None:
        """A request that had waited received its first token `took_s` after its turn."""
        self._first_s.add(took_s, now_s)

    def _off_by(self, number: int, now_s: float) -> float:
        """The current relative error of a request's wait; the request waits, or waited until now."""
        since_s, said_s = self._said.get(number, (now_s, 0.0))
        return (now_s - since_s - said_s) / (said_s + SHORTEST_SCALE_S)

    def _is_next(self, queue: RequestQueue, terms: RequestTerms) -> bool:
        """Whether no request of its tenant goes before it. Also a lower priority of its tenant must have had
        the last turn (not because of aging), or its own priority, with an empty queue. Then the errors of
        waits, and the pace of its own priority, do not count. Otherwise a priority whose waits were long once
        would be refused for as long as that is remembered, while lower priorities are served.
        """
        served = self._served.get(terms.tenant.name, Priority.HIGH)
        above = terms.priority.level - served.level
        return (above > 0 and not queue.own_tokens_before(terms)) or (above == 0 and not len(queue))
