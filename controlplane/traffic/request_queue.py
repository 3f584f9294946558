"""The requests that wait in one gateway for one base's engines: the next one, and those without a place.

Pure: plain data, no clock. `now_s` of one queue never goes back.

- Between tenants: start-time fair queueing (Goyal et al., 1996) on estimated tokens, so that no tenant gets
more than its share by marking its requests as urgent. A tenant is near if it is at most LEAD requests ahead
of the tenant that is furthest behind. Among near tenants, the one with the highest waiting priority is next.
- Within a tenant, the highest priority goes first. Aging: while a request of a lower priority has waited
`aging_s`, one of every `turns` turns of the tenant (two or more) goes to such a request. It is taken from the
priority without a turn for the longest time.
- Within a tenant and priority: by due time, which is the TTFT target, the deadline or `aging_s` after the
arrival, whichever is soonest. Requests with equal terms go in the order of arrival.

Fairness: while two tenants both have requests waiting, compare the tokens that each was served, divided by
its weight. They differ by at most LEAD + 1 times the sum of each tenant's largest request divided by its
weight.

Nothing starves. For a request that has waited `aging_s`, let n be the requests of its tenant and priority
before it, w its tenant's weight, C and c the most and the fewest tokens of a request, L = LEAD + 1. Its
tenant has at most T = 2 * turns * (n + 1) turns until the request goes. Each other tenant has at most
floor((w_other * (T + L) / w + L) * C / c) + 1 turns, whatever arrives meanwhile, unless the request is
displaced, dropped or cancelled (`turns_at_most`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from controlplane.state.terms import Priority
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant

# The number of requests by which a tenant with urgent requests may be ahead of the tenant that is furthest
# behind. With a smaller lead, urgent requests of many tenants wait longer behind less urgent ones. With a
# larger lead, a tenant within its share waits longer for another tenant's urgent requests.
LEAD = 2


@dataclass(frozen=True)
class QueueLimits:
    """`places` is the most requests that may wait."""

    places: int
    aging_s: float = 10.0
    turns: int = 4


class Backlog(NamedTuple):
    """The number of waiting requests of one priority, and when the oldest arrived (None: none waits)."""

    requests: int
    oldest_arrived_s: float | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the queue. `number` is unique in the queue, and grows in the order of arrival."""

    number: int
    terms: RequestTerms
    arrived_s: float


class Full(StrEnum):
    """Why there is no place: all places of the queue, or of the tenant, are taken."""

    LINE = "line"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Joined:
    """`displaced` lost its place to `waiting`."""

    waiting: Waiting
    displaced: Waiting | None = None


class _Timed(NamedTuple):
    """The number of a request, and a time by which requests are sorted."""

    at_s: float
    number: int


class _Flow:
    """The requests of one tenant and priority. `last_turn` is the number of the tenant's last turn for
    them."""

    def __init__(self) -> None:
        self.tokens = 0
        self.last_turn = 0
        self._order: list[_Timed] = []  # by due time
        self._waiting: dict[int, Waiting] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting, due_s: float) -> None:
        insort(self._order, _Timed(due_s, waiting.number))
        self._waiting[waiting.number] = waiting
        self.tokens += waiting.terms.tokens

    def remove(self, waiting: Waiting, due_s: float) -> None:
        del self._order[bisect_left(self._order, _Timed(due_s, waiting.number))]
        del self._waiting[waiting.number]
        self.tokens -= waiting.terms.tokens

    def first(self) -> Waiting:
        return self._waiting[self._order[0].number]

    def oldest(self) -> Waiting:
        return next(iter(self._waiting.values()))

    def youngest(self) -> Waiting:
        return next(reversed(self._waiting.values()))


class _Queue:
    """The requests of one tenant. `start` is the virtual time of the next request's turn, `last_starts` are
    the virtual times of the last LEAD turns."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.start = 0.0
        self.last_starts: deque[float] = deque([0.0], LEAD)
        self.count = self.tokens = 0
        self.flows = {priority: _Flow() for priority in Priority}
        self._turn = 0
        self._passed_over = 0  # turns since a lower priority had one, while an aged request waited

    def add(self, waiting: Waiting, due_s: float) -> None:
        self.flows[waiting.terms.priority].add(waiting, due_s)
        self.count += 1
        self.tokens += waiting.terms.tokens

    def remove(self, waiting: Waiting, due_s: float) -> None:
        self.flows[waiting.terms.priority].remove(waiting, due_s)
        self.count -= 1
        self.tokens -= waiting.terms.tokens

    def above(self, priority: Priority) -> Iterator[_Flow]:
        """Higher priorities with waiting requests."""
        return (flow for p, flow in self.flows.items() if p.level > priority.level and flow)

    def tokens_from(self, priority: Priority) -> int:
        """Tokens of this priority and higher ones."""
        return self.flows[priority].tokens + sum(flow.tokens for flow in self.above(priority))

    def share_until(self, virtual: float) -> float:
        """Tokens that its share allows before that time."""
        return max(0.0, virtual - self.start) * self.tenant.weight

    def is_near(self, virtual: float) -> bool:
        """Whether its tenant is ahead of its share by at most its last LEAD requests."""
        return self.last_starts[0] <= virtual

    def highest(self) -> Priority:
        """The highest priority with waiting requests."""
        return next(priority for priority in reversed(Priority) if self.flows[priority])

    def lowest(self) -> Priority:
        return next(priority for priority in Priority if self.flows[priority])

    def take(self, now_s: float, limits: QueueLimits) -> Waiting:
        """The next request of the tenant."""
        flow = self._next_flow(now_s, limits)
        self._turn += 1
        flow.last_turn = self._turn
        waiting = flow.first()
        self.last_starts.append(self.start)
        self.start += waiting.terms.tokens / self.tenant.weight
        return waiting

    def _next_flow(self, now_s: float, limits: QueueLimits) -> _Flow:
        """The highest priority with waiting requests or, in its turn, a priority with an aged request."""
        occupied = [flow for flow in reversed(self.flows.values()) if flow]
        if len(occupied) == 1:
            self._passed_over = 0
            return occupied[0]
        aged = [flow for flow in occupied if flow.oldest().arrived_s <= now_s - limits.aging_s]
        if aged in ([], occupied[:1]):
            self._passed_over = 0
            return occupied[0]
        if self._passed_over < limits.turns - 1:
            self._passed_over += 1
            return occupied[0]
        self._passed_over = 0
        return min(aged, key=lambda flow: flow.last_turn)


class RequestQueue:
    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._queues: dict[str, _Queue] = {}  # empty ones remember what their tenants were served
        self._occupied: dict[str, _Queue] = {}
        self._virtual = 0.0
        self._waiting: dict[int, Waiting] = {}
        self._late: list[_Timed] = []  # by the time when they are dropped
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def add(self, terms: RequestTerms, now_s: float) -> Joined | Full:
        """Add a new request at the time `now_s`. If all places are taken it may displace another request.

        If its tenant has less than its share of the places, it displaces the youngest request of the lowest
        priority of the tenant furthest above its share. Otherwise it displaces the youngest request of the
        lowest priority below its own, of its own tenant or of a tenant above its share.
        """
        displaced: Waiting | None = None
        tenant, own = terms.tenant, self._queue_of(terms)
        if tenant.max_waiting is not None and own.count >= tenant.max_waiting:
            displaced = _youngest_below(terms.priority, [own])
            if displaced is None:
                return Full.TENANT
        elif len(self._waiting) >= self.limits.places:
            displaced = self._to_displace(terms, own)
            if displaced is None:
                return Full.LINE
        if displaced is not None:
            self.remove(displaced.number)
        self._number += 1
        waiting = Waiting(self._number, terms, now_s)
        self._insert(waiting)
        return Joined(waiting, displaced)

    def take(self, now_s: float) -> Waiting | None:
        """The request whose turn it is, which leaves the queue; None if the queue is empty."""
        if not self._waiting:
            return None
        queue = self._next_queue()
        waiting = queue.take(now_s, self.limits)
        self.remove(waiting.number)
        return waiting

    def _next_queue(self) -> _Queue:
        occupied = self._occupied.values()
        if len(occupied) == 1:
            (queue,) = occupied
            self._virtual = queue.start
            return queue
        self._virtual = min(queue.start for queue in occupied)
        return min((queue for queue in occupied if queue.is_near(self._virtual)), key=_goes_first)

    def remove(self, number: int) -> Waiting | None:
        """Remove a cancelled request; None if it is no longer in the queue."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return None
        name = waiting.terms.tenant.name
        queue = self._queues[name]
        queue.remove(waiting, self._due_s(waiting))
        if not queue.count:
            del self._occupied[name]
        if not self._waiting:  # from here on all tenants start equal
            self._virtual = max(queue.start for queue in self._queues.values())
            self._queues.clear()
        if (late := _late_key(waiting)) is not None:
            del self._late[bisect_left(self._late, late)]
        return waiting

    def drop_late(self, now_s: float) -> list[Waiting]:
        """Remove late requests that are to be dropped, the first to become late first."""
        if not self._late:
            return []
        late = self._late[: bisect_left(self._late, _Timed(now_s, self._number + 1))]
        return [waiting for _, number in late if (waiting := self.remove(number)) is not None]

    def waits_above(self, terms: RequestTerms) -> bool:
        """Whether a request of this tenant with a higher priority waits."""
        return any(self._queue_of(terms).above(terms.priority))

    def first_of(self, terms: RequestTerms) -> Waiting | None:
        """The first request of this tenant and priority."""
        flow = self._queue_of(terms).flows[terms.priority]
        return flow.first() if flow else None

    def tokens_before(self, terms: RequestTerms) -> float:
        """Estimated tokens that go before a new request, without other arrivals.

        For another tenant, its requests of at least this urgency count, up to its share at the time of the
        new request's turn. All its requests count up to its share at the time when the new request's tenant
        is no longer near.
        """
        own, before = self._queue_of(terms), self.own_tokens_before(terms)
        if not self._has_others(own):
            return before
        each = terms.tokens / terms.tenant.weight
        goes = self._start(own) + before / terms.tenant.weight + each
        ahead = goes - (LEAD + 1) * each
        return before + sum(
            max(
                min(queue.tokens_from(terms.priority), queue.share_until(goes)),
                min(queue.tokens, queue.share_until(ahead)),
            )
            for queue in self._others(own)
        )

    def own_tokens_before(self, terms: RequestTerms) -> int:
        """The part of `tokens_before` of its own tenant."""
        return self._queue_of(terms).tokens_from(terms.priority)

    def tokens_of_priority_before(self, terms: RequestTerms) -> float:
        """The part of `tokens_before` of its own priority."""
        own = self._queue_of(terms)
        before = own.flows[terms.priority].tokens
        if not self._has_others(own):
            return before
        goes = self._start(own) + (before + terms.tokens) / terms.tenant.weight
        return before + sum(
            min(queue.flows[terms.priority].tokens, queue.share_until(goes)) for queue in self._others(own)
        )

    def backlog(self) -> dict[Priority, Backlog]:
        """The waiting requests of each priority. Other threads may call this, too."""
        queues = list(self._occupied.values())
        flows = {p: [flow for queue in queues if (flow := queue.flows[p])] for p in Priority}
        return {
            p: Backlog(sum(map(len, found)), min((flow.oldest().arrived_s for flow in found), default=None))
            for p, found in flows.items()
        }

    def __iter__(self) -> Iterator[Waiting]:
        """All requests, in the order of arrival."""
        return iter(self._waiting.values())

    def _queue_of(self, terms: RequestTerms) -> _Queue:
        """The tenant's queue; an empty one if none of its requests wait and nothing is remembered."""
        return self._queues.get(terms.tenant.name) or _Queue(terms.tenant)

    def _others(self, own: _Queue) -> Iterator[_Queue]:
        return (queue for queue in self._occupied.values() if queue is not own)

    def _has_others(self, own: _Queue) -> bool:
        return len(self._occupied) > (1 if own.count else 0)

    def _start(self, queue: _Queue) -> float:
        """The virtual time of a tenant's next turn; if none of its requests wait, it is not before now."""
        return queue.start if queue.count else max(self._virtual, queue.start)

    def _insert(self, waiting: Waiting) -> None:
        tenant, queue = waiting.terms.tenant, self._queue_of(waiting.terms)
        queue.tenant, queue.start = tenant, self._start(queue)
        self._queues[tenant.name] = self._occupied[tenant.name] = queue
        self._waiting[waiting.number] = waiting
        queue.add(waiting, self._due_s(waiting))
        if (late := _late_key(waiting)) is not None:
            insort(self._late, late)

    def _due_s(self, waiting: Waiting) -> float:
        terms = waiting.terms
        targets = (terms.ttft_s, terms.deadline_s, self.limits.aging_s)
        return waiting.arrived_s + min(target for target in targets if target is not None)

    def _to_displace(self, terms: RequestTerms, own: _Queue) -> Waiting | None:
        """The request that a new one may displace when all places are taken."""
        weights = {queue.tenant.name: queue.tenant.weight for queue in self._occupied.values()}
        weights[terms.tenant.name] = terms.tenant.weight
        place = sum(weights.values()) / self.limits.places
        above = [queue for queue in self._occupied.values() if queue.count * place > queue.tenant.weight]
        if above and (own.count + 1) * place <= terms.tenant.weight:
            furthest = max(above, key=lambda queue: queue.count / queue.tenant.weight)
            return furthest.flows[furthest.lowest()].youngest()
        return _youngest_below(terms.priority, [own, *above])


def _goes_first(queue: _Queue) -> tuple[int, float, int]:
    highest = queue.highest()
    return -highest.level, queue.start, queue.flows[highest].first().number


def _youngest_below(priority: Priority, queues: Iterable[_Queue]) -> Waiting | None:
    """The youngest waiting request of the lowest priority in these queues that is below `priority`."""
    found = [flow for queue in queues for p, flow in queue.flows.items() if p.level < priority.level and flow]
    youngest = (flow.youngest() for flow in found)
    return min(youngest, key=lambda waiting: (waiting.terms.priority.level, -waiting.number), default=None)


def turns_at_most(
    waiting: Waiting, before: Iterable[Waiting], others: Iterable[Tenant], tokens: tuple[int, int], turns: int
) -> int:
    """The turns within which a request that has waited `aging_s` goes, as in the module's docstring. `before`
    are the requests of its tenant and priority that go first, `others` the other tenants, `tokens` the fewest
    and the most tokens of any request.
    """
    least, most = tokens
    own = (len(Priority) - 1) * turns * (len(list(before)) + 1)
    weight, lead = waiting.terms.tenant.weight, LEAD + 1
    return own + sum(
        math.floor((other.weight * (own + lead) / weight + lead) * most / least) + 1 for other in others
    )


def _late_key(waiting: Waiting) -> _Timed | None:
    after_s = waiting.terms.dropped_after_s
    return None if after_s is None else _Timed(waiting.arrived_s + after_s, waiting.number)
