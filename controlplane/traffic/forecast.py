"""When a newcomer to the line would have its first token. Pure.

A forecast adds up how long the newcomer waits in the line, by how fast it moves; how far such waits were off
lately, with those that still wait and are first of their tenants (Ibrahim and Whitt, 2009); and how long it
took lately from a request's turn to its first token. Of the last two it takes a quantile of what was seen, so
that no distribution need be assumed (conformal prediction; Vovk, Gammerman and Shafer, 2005): of waits a high
one for a tenant above its share. One within its share is refused only if it would probably be late.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from enum import Enum

from controlplane.state.terms import Priority
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant
from controlplane.traffic.waiting_line import Waiting, WaitingLine

# Observations are forgotten with this time constant, but the last few never; fewer than these say nothing.
MEMORY_S = 10.0
ENOUGH = 8
# With many newcomers refused there is little to see, so what was seen long ago is forgotten, or they would be
# refused for ever.
LAST, FEW = 200, 100
FORGET_S = 30.0
# Higher priorities of a tenant crowd its lower ones out when they asked lately for more than CROWDED times
# what was admitted of all that the tenant asked for, and more than a CROWDING part of that was theirs, and so
# many tokens.
CROWDED, CROWDING = 1.1, 0.6
CROWDING_TOKENS = 256
# This part of the last first tokens came as soon after their turns as is forecast, whoever asks: a variant
# that is not loaded yet takes seconds, and nobody is to be refused for those.
FIRST_QUANTILE = 0.9
# How far a wait is off grows with the wait, from as much as this long a wait would be.
SHORTEST_SCALE_S = 0.5
# How far a wait is taken to be off before any was seen.
UNSEEN = 0.25


class LineSpeed:
    """Estimated tokens that leave a line each second while requests wait in it.

    Old observations fade with `memory_s`, though of a slow line by no more than one part in `enough` at a
    time. `now_s` never goes back.
    """

    def __init__(self, memory_s: float = MEMORY_S, enough: int = ENOUGH) -> None:
        self._memory_s = memory_s
        self._enough = enough
        self._tokens = self._seconds = self._faded_turns = 0.0
        self._turns = 0
        self._last_s: float | None = None
        self._turned_s = -math.inf

    def begin(self, now_s: float) -> None:
        """The line begins to move, or its first request waits."""
        self._last_s = now_s

    def stood_s(self, now_s: float) -> float | None:
        """Since the last one left it, or it began; None: it never did."""
        return None if self._last_s is None else now_s - self._last_s

    def moved(self, tokens: int, now_s: float) -> None:
        """One with so many tokens left it; since the last one, or since it began, requests waited."""
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
        """Until so many tokens have left; None: not enough is known."""
        if self._turns < self._enough or self._tokens <= 0:
            return None
        return tokens * self._seconds / self._tokens

    def turn_s(self, now_s: float) -> float:
        """From one turn to the next; 0.0: not known, or too long ago."""
        if self._turns < self._enough or self._turned_s < now_s - FORGET_S:
            return 0.0
        return self._seconds / self._faded_turns


class Fading:
    """A sum that fades with FORGET_S."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since_s = 0.0  # the last that was added

    def add(self, value: float, now_s: float) -> None:
        self._sum = self.at(now_s) + value
        self._since_s = now_s

    def at(self, now_s: float) -> float:
        return self._sum * math.exp((self._since_s - now_s) / FORGET_S)


class ShareUse(Enum):
    """Of a tenant beside others. The value is which part of the last waits was within what is forecast."""

    ALONE = 0.9
    WITHIN = 0.5
    ABOVE = 0.96


class _Asked:
    """Of a tenant's requests of one priority, in tokens."""

    def __init__(self) -> None:
        self.asked, self.admitted = Fading(), Fading()
        self.last_s = -math.inf


class _Demand:
    """What a tenant asked for lately, and what was admitted of it."""

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
        """Whether higher priorities, of which one asked within `aging_s`, take most of what is admitted and
        ask for more than that."""
        above = [of for p, of in self._of.items() if p.level > priority.level]
        if all(of.last_s < now_s - aging_s for of in above):
            return False
        asked = sum(of.asked.at(now_s) for of in above)
        admitted = sum(of.admitted.at(now_s) for of in above)
        in_all = self.admitted(now_s)
        return admitted > max(CROWDING_TOKENS, CROWDING * in_all) and asked > CROWDED * in_all


class Shares:
    """Which tenants were admitted lately for no more than their weight's share of all that went, in tokens of
    all priorities. What was refused does not count: who asks again would be above its share for that alone.
    And whose lower priorities are crowded out by its own higher ones.

    A tenant that asked for nothing for FORGET_S is forgotten, and has no share.
    """

    def __init__(self) -> None:
        self._went = Fading()
        self._tenants: dict[str, _Demand] = {}  # who asked last is the last
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
        """One of a tenant's requests was admitted to the line."""
        if terms.tenant.name not in self._tenants:
            self.asked(terms, now_s)
        self._tenants[terms.tenant.name].admit(terms, now_s)

    def went(self, tokens: int, now_s: float) -> None:
        self._went.add(tokens, now_s)

    def use_of(self, tenant: Tenant, now_s: float) -> ShareUse:
        """By one that has asked."""
        if len(self._tenants) < 2:
            return ShareUse.ALONE
        joined = self._tenants[tenant.name].admitted(now_s)
        is_within = joined * self._weight <= self._went.at(now_s) * tenant.weight
        return ShareUse.WITHIN if is_within else ShareUse.ABOVE

    def is_crowded_out(self, terms: RequestTerms, now_s: float, aging_s: float) -> bool:
        """By higher priorities of its tenant, until it has waited `aging_s`."""
        demand = self._tenants.get(terms.tenant.name)
        return demand is not None and demand.is_crowded_out(terms.priority, now_s, aging_s)


class LastSeen:
    """The last observations of something: at most LAST, none older than FORGET_S."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # (when, what)
        self._sorted: list[float] = []

    def add(self, value: float, now_s: float) -> None:
        if len(self._seen) == LAST:
            self._forget()
        self._seen.append((now_s, value))
        insort(self._sorted, value)

    def quantile(self, share: float, unseen: float, now_s: float) -> float:
        """The least value that this share of the observations are no larger than. What lacks of FEW of them
        counts as `unseen`: so one that was far off does not decide alone."""
        while self._seen and self._seen[0][0] < now_s - FORGET_S:
            self._forget()
        values, lacking = self._sorted, FEW - len(self._sorted)
        index = math.ceil(share * max(len(values), FEW)) - 1
        if lacking > 0:
            values = sorted([*values, *[unseen] * lacking])
        return values[index]

    def _forget(self) -> None:
        del self._sorted[bisect_left(self._sorted, self._seen.popleft()[1])]


class _Pool:
    """Of one priority, requests of tenants that use their shares alike: how many wait, their pace, and by how
    far their waits were off."""

    def __init__(self) -> None:
        self.count = 0
        self.speed = LineSpeed()
        self.off = LastSeen()


class Forecast:
    """Of one line. Requests that come later may go before a newcomer: those of a higher priority, and of
    tenants with less than their share. They are not in the line yet, but they were in the way of those of its
    pool that went before: so the pool's pace alone counts, too.
    """

    def __init__(self) -> None:
        self._whole = LineSpeed()
        self._pools = {(use, priority): _Pool() for use in ShareUse for priority in Priority}
        self._pool_of: dict[int, _Pool] = {}  # by number, of those that wait
        self._said: dict[int, tuple[float, float]] = {}  # by number: since when, the wait forecast
        self._first_s = LastSeen()
        self._shares = Shares()
        # Of each tenant, the priority of its last turn that no higher one of its own waited for.
        self._served: dict[str, Priority] = {}

    def asked(self, terms: RequestTerms, now_s: float) -> None:
        """A newcomer is there: it may be refused."""
        self._shares.asked(terms, now_s)

    def ttft_s(
        self, line: WaitingLine, terms: RequestTerms, wait_s: float | None, now_s: float
    ) -> float | None:
        """Of a newcomer whose `wait_s` is that; None: not enough is known."""
        if wait_s is None:
            return None
        use, off = self._shares.use_of(terms.tenant, now_s), UNSEEN
        if not self._is_next(line, terms):
            first = line.first_of(terms) if use is ShareUse.ABOVE else None
            off = max(
                0.0,
                self._pools[use, terms.priority].off.quantile(use.value, UNSEEN, now_s),
                0.0 if first is None else self._off_by(first.number, now_s),
            )
        wait_s += off * (wait_s + SHORTEST_SCALE_S)
        if self._shares.is_crowded_out(terms, now_s, line.limits.aging_s):
            wait_s = max(wait_s, line.limits.aging_s)
        return wait_s + self._first_s.quantile(FIRST_QUANTILE, 0.0, now_s)

    def wait_s(self, line: WaitingLine, terms: RequestTerms, now_s: float) -> float | None:
        """In the line, at the paces of now; None: not enough is known."""
        use = self._shares.use_of(terms.tenant, now_s)
        pool = self._pools[use, terms.priority]
        known = [self._whole.wait_s(line.tokens_before(terms))]
        wait_s = pool.speed.wait_s(line.tokens_of_priority_before(terms))
        if wait_s is not None:
            passes = use is ShareUse.ALONE or self._is_next(line, terms)
            known.append(wait_s + (0.0 if passes else pool.speed.turn_s(now_s)))
            known.append(pool.speed.stood_s(now_s) if pool.count else None)
        return max((wait_s for wait_s in known if wait_s is not None), default=None)

    def turn_s(self, terms: RequestTerms) -> float | None:
        """For how long the whole line moves in a request's stead."""
        return self._whole.wait_s(terms.tokens)

    def begin(self, now_s: float) -> None:
        """There are workers again: who waits is counted from now on, and what was forecast is forgotten."""
        self._said.clear()
        self._shares = Shares()
        for speed in (self._whole, *(pool.speed for pool in self._pools.values())):
            speed.begin(now_s)

    def joined(self, line: WaitingLine, waiting: Waiting, wait_s: float | None, now_s: float) -> None:
        """`waiting`, which has asked, has just joined `line`; `wait_s` is what was known of its wait."""
        if len(line) == 1:
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

    def moved(self, line: WaitingLine, waiting: Waiting, now_s: float) -> None:
        """It has had its turn, and left `line`."""
        terms = waiting.terms
        if not line.waits_above(terms):
            self._served[terms.tenant.name] = terms.priority
        self._shares.went(terms.tokens, now_s)
        self._whole.moved(terms.tokens, now_s)
        self._pool_of[waiting.number].speed.moved(terms.tokens, now_s)
        self.waited(waiting, now_s)

    def waited(self, waiting: Waiting, now_s: float) -> None:
        """It has left the line: for its turn, or because it was late, and would have waited for longer."""
        if waiting.number in self._said:
            self._pool_of[waiting.number].off.add(self._off_by(waiting.number, now_s), now_s)
        self.left(waiting.number)

    def left(self, number: int) -> None:
        """It left the line without a turn, by its own will or displaced, which says nothing."""
        self._said.pop(number, None)
        if (pool := self._pool_of.pop(number, None)) is not None:
            pool.count -= 1

    def answered(self, took_s: float, now_s: float) -> None:
        """A request that had waited has its first token, so long after its turn."""
        self._first_s.add(took_s, now_s)

    def _off_by(self, number: int, now_s: float) -> float:
        """How far the wait of one that waits, or did until now, is off by now."""
        since_s, said_s = self._said.get(number, (now_s, 0.0))
        return (now_s - since_s - said_s) / (said_s + SHORTEST_SCALE_S)

    def _is_next(self, line: WaitingLine, terms: RequestTerms) -> bool:
        """Whether nobody of its tenant goes before it, and a lower priority of its tenant has had the last
        turn (not for its age), or its own and nobody waits. What waits were off by, and how long its own
        priority's turns took, does not count then. Else a priority whose waits were long once would be
        refused for as long as that is remembered, and lower ones served.
        """
        served = self._served.get(terms.tenant.name, Priority.HIGH)
        above = terms.priority.level - served.level
        return (above > 0 and not line.own_tokens_before(terms)) or (above == 0 and not len(line))
