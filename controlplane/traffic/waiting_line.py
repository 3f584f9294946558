"""The requests that wait in one gateway for one base's engines: which goes next, and which finds no place.

Pure: plain data, no clock. `now_s` of one line never goes back.

- Between priorities: the highest goes first. Aging: while a request of a lower one has waited `aging_s`, one
  of every `turns` turns is for a lower priority, the one that had no turn for longest.
- Between tenants of one priority: start-time fair queueing (Goyal et al., 1996) on estimated tokens.
- Of one tenant and priority: by when it is due, which is its TTFT target (or deadline) or `aging_s` after its
  arrival, whichever is sooner. Those with equal terms go in the order in which they came.

Fairness: while two tenants both have requests of one priority waiting, the tokens of those that go, each
divided by its tenant's weight, differ by at most the sum of each one's largest request divided by its
weight.

Nothing starves: of a request that has waited `aging_s`, let n be how many of its tenant and priority are
before it, with q tokens in all, w its tenant's weight, C and c the most and the fewest tokens of a request.
It goes within 2 * turns * (n + 1 + sum over other tenants of (floor(w_other * (q + C) / (w * c)) + 1)) turns,
whatever comes in the meantime, unless it is displaced, dropped or cancelled (`turns_at_most`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from controlplane.state.terms import Priority
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant


@dataclass(frozen=True)
class LineLimits:
    """`places` is how many may wait in all."""

    places: int
    aging_s: float = 10.0
    turns: int = 4


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the line. `number` is unique in it, and grows in the order in which they came."""

    number: int
    terms: RequestTerms
    arrived_s: float


class Full(StrEnum):
    """Why there is no place: the line's are all taken, or the tenant's."""

    LINE = "line"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Joined:
    """`displaced` lost its place to `waiting`."""

    waiting: Waiting
    displaced: Waiting | None = None


class _Flow:
    """The requests of one tenant and priority. `start` is the virtual time at which the next one goes."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.start = 0.0
        self.finish = 0.0
        self.tokens = 0
        self._order: list[tuple[float, int]] = []  # (due_s, number)
        self._waiting: dict[int, Waiting] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting, due_s: float) -> None:
        insort(self._order, (due_s, waiting.number))
        self._waiting[waiting.number] = waiting
        self.tokens += waiting.terms.tokens

    def remove(self, waiting: Waiting, due_s: float) -> None:
        del self._order[bisect_left(self._order, (due_s, waiting.number))]
        del self._waiting[waiting.number]
        self.tokens -= waiting.terms.tokens

    def first(self) -> Waiting:
        return self._waiting[self._order[0][1]]

    def oldest(self) -> Waiting:
        return next(iter(self._waiting.values()))

    def youngest(self) -> Waiting:
        return next(reversed(self._waiting.values()))


class _Band:
    """The requests of one priority. `virtual` is the virtual time of the last one that went."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}
        self.virtual = 0.0
        self.last_turn = 0

    def occupied(self) -> Iterator[_Flow]:
        return (flow for flow in self.flows.values() if flow)

    def flow(self, tenant: Tenant) -> _Flow:
        """The tenant's, also an empty one: it remembers what the tenant has had."""
        flow = self.flows.setdefault(tenant.name, _Flow(tenant))
        flow.tenant = tenant
        if not flow:
            flow.start = max(self.virtual, flow.finish)
        return flow

    def oldest_s(self) -> float | None:
        return min((flow.oldest().arrived_s for flow in self.occupied()), default=None)

    def next(self) -> Waiting | None:
        """The first of the flow that comes soonest in virtual time; of equals, of the one that came first."""
        flow = min(self.occupied(), key=lambda flow: (flow.start, flow.first().number), default=None)
        return None if flow is None else flow.first()

    def served(self, flow: _Flow, tokens: int) -> None:
        self.virtual = flow.start
        flow.start = flow.finish = flow.start + tokens / flow.tenant.weight


class WaitingLine:
    def __init__(self, limits: LineLimits) -> None:
        self.limits = limits
        self._bands = {priority: _Band() for priority in Priority}
        self._waiting: dict[int, Waiting] = {}
        self._by_tenant: dict[str, int] = {}
        self._late: list[tuple[float, int]] = []  # (dropped_at_s, number)
        self._number = 0
        self._turn = 0
        self._passed_over = 0  # turns since a lower priority had one, while it was its time

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def add(self, terms: RequestTerms, now_s: float) -> Joined | Full:
        """A newcomer at the time `now_s`. Where all places are taken, it displaces the youngest of the lowest
        priority below its own; or, of its own priority, the youngest of the tenant that is furthest above its
        share of places, if its own tenant is below its share.
        """
        displaced: Waiting | None = None
        tenant = terms.tenant
        own = self._by_tenant.get(tenant.name, 0)
        if tenant.max_waiting is not None and own >= tenant.max_waiting:
            displaced = self._lowest(terms.priority, tenant.name)
            if displaced is None:
                return Full.TENANT
        elif len(self._waiting) >= self.limits.places:
            displaced = self._lowest(terms.priority) or self._above_its_share(terms)
            if displaced is None:
                return Full.LINE
        if displaced is not None:
            self.remove(displaced.number)
        self._number += 1
        waiting = Waiting(self._number, terms, now_s)
        self._insert(waiting)
        return Joined(waiting, displaced)

    def take(self, now_s: float) -> Waiting | None:
        """The one whose turn it is, which leaves the line; None when nobody waits."""
        band = self._next_band(now_s)
        waiting = None if band is None else band.next()
        if band is None or waiting is None:
            return None
        self._turn += 1
        band.last_turn = self._turn
        band.served(band.flows[waiting.terms.tenant.name], waiting.terms.tokens)
        self.remove(waiting.number)
        return waiting

    def remove(self, number: int) -> Waiting | None:
        """Take out one that is cancelled; None when it is not there any more."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return None
        terms = waiting.terms
        self._bands[terms.priority].flows[terms.tenant.name].remove(waiting, self._due_s(waiting))
        self._by_tenant[terms.tenant.name] -= 1
        if (late := _late_key(waiting)) is not None:
            del self._late[bisect_left(self._late, late)]
        return waiting

    def drop_late(self, now_s: float) -> list[Waiting]:
        """Take out those that are late and are to be dropped then, the first to be late first."""
        late = self._late[: bisect_left(self._late, (now_s, self._number + 1))]
        return [waiting for _, number in late if (waiting := self.remove(number)) is not None]

    def next_late_s(self) -> float | None:
        """When the next one is to be dropped."""
        return self._late[0][0] if self._late else None

    def count(self, priority: Priority) -> int:
        """How many of a priority wait."""
        return sum(len(flow) for flow in self._bands[priority].occupied())

    def waits_above(self, priority: Priority) -> bool:
        """Whether anybody of a higher priority waits."""
        return any(any(b.occupied()) for p, b in self._bands.items() if p.level > priority.level)

    def first_ones(self, priority: Priority) -> list[Waiting]:
        """Of each tenant, the one of this priority that goes first."""
        return [flow.first() for flow in self._bands[priority].occupied()]

    def tokens_before(self, terms: RequestTerms, own_priority: bool = False, whole: bool = False) -> float:
        """Estimated tokens that go before a newcomer would, if nobody else came; or those of its own priority
        among them. `whole`: if all that wait of its priority went first, whatever their tenants' shares.
        """
        weight, tenant, level = terms.tenant.weight, terms.tenant.name, terms.priority.level
        above = sum(flow.tokens for p, b in self._bands.items() if p.level > level for flow in b.occupied())
        flows = self._bands[terms.priority].flows
        own = flows[tenant].tokens if tenant in flows else 0
        most = math.inf if whole else (own + terms.tokens) / weight
        others = sum(
            min(flow.tokens, most * flow.tenant.weight) for name, flow in flows.items() if name != tenant
        )
        return own + others + (0 if own_priority else above)

    def standing(self) -> dict[Priority, tuple[int, float | None]]:
        """Of each priority: how many wait, and since when the oldest does."""
        return {p: (sum(map(len, band.occupied())), band.oldest_s()) for p, band in self._bands.items()}

    def __iter__(self) -> Iterator[Waiting]:
        """All, in the order in which they came."""
        return iter(self._waiting.values())

    def _insert(self, waiting: Waiting) -> None:
        tenant = waiting.terms.tenant
        self._waiting[waiting.number] = waiting
        self._by_tenant[tenant.name] = self._by_tenant.get(tenant.name, 0) + 1
        self._bands[waiting.terms.priority].flow(tenant).add(waiting, self._due_s(waiting))
        if (late := _late_key(waiting)) is not None:
            insort(self._late, late)

    def _due_s(self, waiting: Waiting) -> float:
        terms = waiting.terms
        targets = (terms.ttft_s, terms.deadline_s, self.limits.aging_s)
        return waiting.arrived_s + min(target for target in targets if target is not None)

    def _next_band(self, now_s: float) -> _Band | None:
        """The highest that somebody waits in, or in its turn a lower one."""
        occupied = [band for band in reversed(self._bands.values()) if any(band.occupied())]
        if len(occupied) < 2:
            self._passed_over = 0
            return occupied[0] if occupied else None
        latest_s = now_s - self.limits.aging_s
        aged = [
            band for band in occupied[1:] if (oldest := band.oldest_s()) is not None and oldest <= latest_s
        ]
        if not aged:
            self._passed_over = 0
            return occupied[0]
        if self._passed_over < self.limits.turns - 1:
            self._passed_over += 1
            return occupied[0]
        self._passed_over = 0
        return min(aged, key=lambda band: band.last_turn)

    def _lowest(self, below: Priority, tenant: str | None = None) -> Waiting | None:
        """The youngest of the lowest priority, which must be below this one; of one tenant or of all."""
        for priority, band in self._bands.items():
            if priority.level >= below.level:
                return None
            flows = [f for f in band.occupied() if tenant in (None, f.tenant.name)]
            if flows:
                return max((flow.youngest() for flow in flows), key=lambda waiting: waiting.number)
        return None

    def _above_its_share(self, terms: RequestTerms) -> Waiting | None:
        """Whom a newcomer may displace whose tenant has less than its share of the places."""
        weights = {
            flow.tenant.name: flow.tenant.weight for band in self._bands.values() for flow in band.occupied()
        }
        weights[terms.tenant.name] = terms.tenant.weight
        place = sum(weights.values()) / self.limits.places
        if (self._by_tenant.get(terms.tenant.name, 0) + 1) * place > terms.tenant.weight:
            return None
        flows = [
            flow for flow in self._bands[terms.priority].occupied() if flow.tenant.name != terms.tenant.name
        ]
        above = [flow for flow in flows if self._by_tenant[flow.tenant.name] * place > flow.tenant.weight]
        furthest = max(above, key=lambda f: self._by_tenant[f.tenant.name] / f.tenant.weight, default=None)
        return None if furthest is None else furthest.youngest()


def turns_at_most(
    waiting: Waiting, before: Iterable[Waiting], others: Iterable[Tenant], tokens: tuple[int, int], turns: int
) -> int:
    """Within how many turns one that has waited `aging_s` goes, as above. `before` are those of its tenant
    and priority that go first, `others` the other tenants, `tokens` the fewest and the most of any request.
    """
    least, most = tokens
    ahead = [other.terms.tokens for other in before]
    ratio = (sum(ahead) + most) / (waiting.terms.tenant.weight * least)
    passing = sum(math.floor(other.weight * ratio) + 1 for other in others)
    return (len(Priority) - 1) * turns * (len(ahead) + 1 + passing)


def _late_key(waiting: Waiting) -> tuple[float, int] | None:
    after_s = waiting.terms.dropped_after_s
    return None if after_s is None else (waiting.arrived_s + after_s, waiting.number)
