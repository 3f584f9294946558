"""Whether a newcomer's TTFT can still be kept, by how fast the line moves. Pure."""

from __future__ import annotations

import math

from controlplane.state.terms import Priority
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.waiting_line import WaitingLine

FACTOR = 0.8
MIN_RETRY_S = 1.0
# Observations are forgotten with this time constant, but the last few never; fewer than these say nothing.
MEMORY_S = 10.0
ENOUGH = 8


def retry_after_s(wait_s: float | None, terms: RequestTerms, factor: float = FACTOR) -> float | None:
    """None: it is admitted. Else after how long the same request would be, if nobody else came.

    A request is refused when it would wait for longer than `factor` of its TTFT target, or of its deadline.
    `wait_s` None: not known.
    """
    promised = [target for target in (terms.ttft_s, terms.deadline_s) if target is not None]
    if wait_s is None or not promised or wait_s <= factor * min(promised):
        return None
    return max(MIN_RETRY_S, wait_s - factor * min(promised))


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


class LineSpeeds:
    """How soon a newcomer would go, by how fast the line moves, and how fast those of its priority do.

    Requests of a higher priority that come later go before it. They are not in the line yet, but they were in
    the way of those of its priority that went before, so that these tell of them.
    """

    def __init__(self) -> None:
        self._whole = LineSpeed()
        self._own = {priority: LineSpeed() for priority in Priority}

    def begin(self, now_s: float) -> None:
        """There are workers again: who waits is counted from now on."""
        for speed in (self._whole, *self._own.values()):
            speed.begin(now_s)

    def joined(self, line: WaitingLine, terms: RequestTerms, now_s: float) -> None:
        """A request with these terms has just joined `line`."""
        if len(line) == 1:
            self._whole.begin(now_s)
        if line.count(terms.priority) == 1:
            self._own[terms.priority].begin(now_s)

    def moved(self, terms: RequestTerms, now_s: float) -> None:
        """A request with these terms has had its turn."""
        self._whole.moved(terms.tokens, now_s)
        self._own[terms.priority].moved(terms.tokens, now_s)

    def wait_s(self, line: WaitingLine, terms: RequestTerms) -> float | None:
        """Until a newcomer with these terms would go; None: not enough is known."""
        known = (
            self._whole.wait_s(line.tokens_before(terms)),
            self._own[terms.priority].wait_s(line.tokens_before(terms, own_priority=True)),
        )
        return max((wait_s for wait_s in known if wait_s is not None), default=None)

    def turn_s(self, terms: RequestTerms) -> float | None:
        """For how long the whole line moves in a request's stead."""
        return self._whole.wait_s(terms.tokens)
