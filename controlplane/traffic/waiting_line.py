"""The requests that wait in one gateway for one base's engines: which goes next, and which finds no place.

Pure: plain data, no clock. `now_s` of one line never goes back.

- Between tenants: start-time fair queueing (Goyal et al., 1996) on estimated tokens, so that no tenant has
  more than its share for calling its requests urgent. Of those that are at most LEAD requests ahead of who is
  furthest behind, the one with the highest priority waiting goes first.
- Of one tenant, the highest priority goes first. Aging: while a request of a lower one has waited `aging_s`,
  one of every `turns` turns of the tenant (two or more) is for who has waited so long, of the priority that
  had no turn for longest.
- Of one tenant and priority: by when it is due, which is its TTFT target (or deadline) or `aging_s` after its
  arrival, whichever is sooner. Those with equal terms go in the order in which they came.

Fairness: while two tenants both have requests waiting, the tokens of those that go, each divided by its
tenant's weight, differ by at most LEAD + 1 times the sum of each one's largest request divided by its weight.

Nothing starves: of a request that has waited `aging_s`, let n be how many of its tenant and priority are
before it, w its tenant's weight, C and c the most and the fewest tokens of a request, L = LEAD + 1. Its
tenant has T = 2 * turns * (n + 1) turns at most until it goes, and each other tenant at most
floor((w_other * (T + L) / w + L) * C / c) + 1, whatever comes in the meantime, unless it is displaced,
dropped or cancelled (`turns_at_most`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from controlplane.state.terms import Priority
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant

# A tenant goes before others that are less urgent while it is at most so many requests ahead of who is
# furthest behind. With fewer, urgent ones of many tenants wait longer for what is not urgent; with more, a
# tenant within its share waits longer for a stranger's urgent ones.
LEAD = 2


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
    """The requests of one tenant and priority. `last_turn` is the tenant's turn that it had last."""

    def __init__(self) -> None:
        self.tokens = 0
        self.last_turn = 0
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


class _Queue:
    """The requests of one tenant. `start` is the virtual time at which the next one goes, `last_starts` are
    those at which the last LEAD went."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.start = 0.0
        self.last_starts: deque[float] = deque([0.0], LEAD)
        self.count = self.tokens = 0
        self.flows = {priority: _Flow() for priority in Priority}
        self._turn = 0
        self._passed_over = 0  # turns since a lower priority had one, while it was its time

    def add(self, waiting: Waiting, due_s: float) -> None:
        self.flows[waiting.terms.priority].add(waiting, due_s)
        self.count += 1
        self.tokens += waiting.terms.tokens

    def remove(self, waiting: Waiting, due_s: float) -> None:
        self.flows[waiting.terms.priority].remove(waiting, due_s)
        self.count -= 1
        self.tokens -= waiting.terms.tokens

    def above(self, priority: Priority) -> Iterator[_Flow]:
        """Of higher priorities, those in which somebody waits."""
        return (flow for p, flow in self.flows.items() if p.level > priority.level and flow)

    def tokens_from(self, priority: Priority) -> int:
        """Of this priority and higher ones."""
        return self.flows[priority].tokens + sum(flow.tokens for flow in self.above(priority))

    def share_until(self, virtual: float) -> float:
        """Tokens that its share lets go before that time."""
        return max(0.0, virtual - self.start) * self.tenant.weight

    def is_near(self, virtual: float) -> bool:
        """Whether its tenant is not ahead of its share by more than its last LEAD requests."""
        return self.last_starts[0] <= virtual

    def highest(self) -> Priority:
        """Of those in which somebody waits."""
        return next(priority for priority in reversed(Priority) if self.flows[priority])

    def lowest(self) -> Priority:
        return next(priority for priority in Priority if self.flows[priority])

    def take(self, now_s: float, limits: LineLimits) -> Waiting:
        """Whose turn it is of the tenant's."""
        flow = self._next_flow(now_s, limits)
        self._turn += 1
        flow.last_turn = self._turn
        waiting = flow.first()
        self.last_starts.append(self.start)
        self.start += waiting.terms.tokens / self.tenant.weight
        return waiting

    def _next_flow(self, now_s: float, limits: LineLimits) -> _Flow:
        """The highest that somebody waits in, or in its turn one that has waited."""
        occupied = [flow for flow in reversed(self.flows.values()) if flow]
        aged = [flow for flow in occupied if flow.oldest().arrived_s <= now_s - limits.aging_s]
        if aged in ([], occupied[:1]):
            self._passed_over = 0
            return occupied[0]
        if self._passed_over < limits.turns - 1:
            self._passed_over += 1
            return occupied[0]
        self._passed_over = 0
        return min(aged, key=lambda flow: flow.last_turn)


class WaitingLine:
    def __init__(self, limits: LineLimits) -> None:
        self.limits = limits
        self._queues: dict[str, _Queue] = {}  # also empty ones: they remember what their tenants have had
        self._occupied: dict[str, _Queue] = {}
        self._virtual = 0.0
        self._waiting: dict[int, Waiting] = {}
        self._late: list[tuple[float, int]] = []  # (dropped_at_s, number)
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def add(self, terms: RequestTerms, now_s: float) -> Joined | Full:
        """A newcomer at the time `now_s`. Where all places are taken it may displace another.

        If its tenant has less than its share of the places, that is the youngest of the lowest priority of
        the tenant furthest above its share. Otherwise it is the youngest of the lowest priority below its
        own, of its own tenant or of one above its share.
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
        """The one whose turn it is, which leaves the line; None when nobody waits."""
        if not self._waiting:
            return None
        occupied = self._occupied.values()
        self._virtual = min(queue.start for queue in occupied)
        queue = min((queue for queue in occupied if queue.is_near(self._virtual)), key=_goes_first)
        waiting = queue.take(now_s, self.limits)
        self.remove(waiting.number)
        return waiting

    def remove(self, number: int) -> Waiting | None:
        """Take out one that is cancelled; None when it is not there any more."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return None
        name = waiting.terms.tenant.name
        queue = self._queues[name]
        queue.remove(waiting, self._due_s(waiting))
        if not queue.count:
            del self._occupied[name]
        if not self._waiting:  # nobody has had more than others from here on
            self._virtual = max(queue.start for queue in self._queues.values())
            self._queues.clear()
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

    def waits_above(self, terms: RequestTerms) -> bool:
        """Whether anybody of this tenant and a higher priority waits."""
        return any(self._queue_of(terms).above(terms.priority))

    def first_of(self, terms: RequestTerms) -> Waiting | None:
        """The one of this tenant and priority that goes first."""
        flow = self._queue_of(terms).flows[terms.priority]
        return flow.first() if flow else None

    def tokens_before(self, terms: RequestTerms) -> float:
        """Estimated tokens that go before a newcomer would, if nobody else came.

        Of another tenant that is what is as urgent or more, up to its share by the time at which the newcomer
        goes; and all that it has, up to its share by when the newcomer's tenant is no more near its own.
        """
        own, before = self._queue_of(terms), self.own_tokens_before(terms)
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
        """Those of its own tenant among them."""
        return self._queue_of(terms).tokens_from(terms.priority)

    def tokens_of_priority_before(self, terms: RequestTerms) -> float:
        """Those of its own priority among them."""
        own = self._queue_of(terms)
        before = own.flows[terms.priority].tokens
        goes = self._start(own) + (before + terms.tokens) / terms.tenant.weight
        return before + sum(
            min(queue.flows[terms.priority].tokens, queue.share_until(goes)) for queue in self._others(own)
        )

    def standing(self) -> dict[Priority, tuple[int, float | None]]:
        """Of each priority: how many wait, and since when the oldest does. Other threads may ask."""
        queues = list(self._occupied.values())
        flows = {p: [flow for queue in queues if (flow := queue.flows[p])] for p in Priority}
        return {
            p: (sum(map(len, found)), min((flow.oldest().arrived_s for flow in found), default=None))
            for p, found in flows.items()
        }

    def __iter__(self) -> Iterator[Waiting]:
        """All, in the order in which they came."""
        return iter(self._waiting.values())

    def _queue_of(self, terms: RequestTerms) -> _Queue:
        """Its tenant's; an empty one where nobody of it waits and nothing is remembered."""
        return self._queues.get(terms.tenant.name) or _Queue(terms.tenant)

    def _others(self, own: _Queue) -> Iterator[_Queue]:
        return (queue for queue in self._occupied.values() if queue is not own)

    def _start(self, queue: _Queue) -> float:
        """Of a tenant in whose queue nobody waits, the time at which it would go next is not before now."""
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
        """Whom a newcomer may displace where all places are taken."""
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
    """The youngest of the lowest priority, which must be below this one, that waits in these."""
    found = [flow for queue in queues for p, flow in queue.flows.items() if p.level < priority.level and flow]
    youngest = (flow.youngest() for flow in found)
    return min(youngest, key=lambda waiting: (waiting.terms.priority.level, -waiting.number), default=None)


def turns_at_most(
    waiting: Waiting, before: Iterable[Waiting], others: Iterable[Tenant], tokens: tuple[int, int], turns: int
) -> int:
    """Within how many turns one that has waited `aging_s` goes, as above. `before` are those of its tenant
    and priority that go first, `others` the other tenants, `tokens` the fewest and the most of any request.
    """
    least, most = tokens
    own = (len(Priority) - 1) * turns * (len(list(before)) + 1)
    weight, lead = waiting.terms.tenant.weight, LEAD + 1
    return own + sum(
        math.floor((other.weight * (own + lead) / weight + lead) * most / least) + 1 for other in others
    )


def _late_key(waiting: Waiting) -> tuple[float, int] | None:
    after_s = waiting.terms.dropped_after_s
    return None if after_s is None else (waiting.arrived_s + after_s, waiting.number)
