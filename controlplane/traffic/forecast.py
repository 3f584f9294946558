"""When a newcomer to the line would have its first token. Pure.

A forecast adds up how long the newcomer waits in the line, by how fast it moves; how far such waits were off
lately; and how long it took lately from a request's turn to its first token. Of the last two it takes a high
quantile of what was seen, so that no distribution need be assumed (conformal prediction; Vovk, Gammerman and
Shafer, 2005).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from controlplane.state.terms import Priority
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.waiting_line import Waiting, WaitingLine

# Observations are forgotten with this time constant, but the last few never; fewer than these say nothing.
MEMORY_S = 10.0
ENOUGH = 8
# This share of the last waits and first tokens was within what is forecast. With many newcomers refused there
# is little to see, so what was seen long ago is forgotten, or they would be refused for ever.
QUANTILE = 0.9
LAST, FEW = 64, 32
FORGET_S = 30.0
# How far a wait is off grows with the wait, from as much as this long a wait would be.
SHORTEST_SCALE_S = 1.0
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
        self._tokens = self._seconds = 0.0
        self._turns = 0
        self._last_s: float | None = None

    def begin(self, now_s: float) -> None:
        """The line begins to move, or its first request waits."""
        self._last_s = now_s

    def moved(self, tokens: int, now_s: float) -> None:
        """One with so many tokens left it; since the last one, or since it began, requests waited."""
        if self._last_s is None:
            self._last_s = now_s
            return
        took_s = now_s - self._last_s
        kept = max(math.exp(-took_s / self._memory_s), 1 - 1 / self._enough)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + took_s
        self._turns += 1
        self._last_s = now_s

    def wait_s(self, tokens: float) -> float | None:
        """Until so many tokens have left; None: not enough is known."""
        if self._turns < self._enough or self._tokens <= 0:
            return None
        return tokens * self._seconds / self._tokens


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

    def quantile(self, unseen: float, now_s: float) -> float:
        """The least value that QUANTILE of the observations are no larger than. What lacks of FEW of them
        counts as `unseen`: so one that was far off does not decide alone."""
        while self._seen and self._seen[0][0] < now_s - FORGET_S:
            self._forget()
        values, lacking = self._sorted, FEW - len(self._sorted)
        if lacking > 0:
            values = sorted([*values, *[unseen] * lacking])
        return values[math.ceil(QUANTILE * len(values)) - 1]

    def _forget(self) -> None:
        del self._sorted[bisect_left(self._sorted, self._seen.popleft()[1])]


class Forecast:
    """Of one line. Requests of a higher priority that come later go before a newcomer. They are not in the
    line yet, but they were in the way of those of its priority that went before: so the pace of its priority
    alone counts, too.
    """

    def __init__(self) -> None:
        self._whole = LineSpeed()
        self._own = {priority: LineSpeed() for priority in Priority}
        self._said: dict[int, tuple[float, float]] = {}  # by number: since when, the wait forecast
        self._off = {priority: LastSeen() for priority in Priority}
        self._first_s = LastSeen()

    def ttft_s(
        self, line: WaitingLine, terms: RequestTerms, wait_s: float | None, now_s: float
    ) -> float | None:
        """Of a newcomer whose `wait_s` is that, and hardly ever later; None: not enough is known.

        What waits of its priority were off by does not count for one who would be next. Else a priority whose
        waits were long once would be refused for as long as that is remembered, and lower ones served.
        """
        if wait_s is None:
            return None
        is_next = line.tokens_before(terms) == 0
        off = UNSEEN if is_next else max(0.0, self._off[terms.priority].quantile(UNSEEN, now_s))
        return wait_s + off * (wait_s + SHORTEST_SCALE_S) + self._first_s.quantile(0.0, now_s)

    def wait_s(self, line: WaitingLine, terms: RequestTerms) -> float | None:
        """In the line, at the paces of now; None: not enough is known."""
        known = (
            self._whole.wait_s(line.tokens_before(terms)),
            self._own[terms.priority].wait_s(line.tokens_before(terms, own_priority=True)),
        )
        return max((wait_s for wait_s in known if wait_s is not None), default=None)

    def turn_s(self, terms: RequestTerms) -> float | None:
        """For how long the whole line moves in a request's stead."""
        return self._whole.wait_s(terms.tokens)

    def begin(self, now_s: float) -> None:
        """There are workers again: who waits is counted from now on."""
        for speed in (self._whole, *self._own.values()):
            speed.begin(now_s)

    def joined(self, line: WaitingLine, waiting: Waiting, wait_s: float | None, now_s: float) -> None:
        """`waiting` has just joined `line`; `wait_s` is what was known of its wait."""
        if len(line) == 1:
            self._whole.begin(now_s)
        if line.count(waiting.terms.priority) == 1:
            self._own[waiting.terms.priority].begin(now_s)
        if wait_s is not None:
            self._said[waiting.number] = now_s, wait_s

    def moved(self, waiting: Waiting, now_s: float) -> None:
        """It has had its turn."""
        self._whole.moved(waiting.terms.tokens, now_s)
        self._own[waiting.terms.priority].moved(waiting.terms.tokens, now_s)
        self.waited(waiting, now_s)

    def waited(self, waiting: Waiting, now_s: float) -> None:
        """It has left the line: for its turn, or because it was late, and would have waited for longer."""
        since_s, said_s = self._said.pop(waiting.number, (0.0, None))
        if said_s is not None:
            off_s = now_s - since_s - said_s
            self._off[waiting.terms.priority].add(off_s / (said_s + SHORTEST_SCALE_S), now_s)

    def left(self, number: int) -> None:
        """It left the line without a turn, by its own will or displaced, which says nothing."""
        self._said.pop(number, None)

    def answered(self, took_s: float, now_s: float) -> None:
        """A request that had waited has its first token, so long after its turn."""
        self._first_s.add(took_s, now_s)
