"""Which requests may wait for a turn, and which are refused: the queue and its forecast. Pure.

Gateways and the simulator use this same class. `now_s` never goes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from controlplane.state.terms import Priority
from controlplane.traffic.forecast import Forecast
from controlplane.traffic.request_queue import Backlog, Full, Joined, QueueLimits, RequestQueue, Waiting
from controlplane.traffic.request_terms import RequestTerms

MIN_RETRY_S = 1.0


class Reason(StrEnum):
    """Why a request was refused, or ended without an answer: `details.reason` of its error."""

    FULL_LINE = "full_line"
    FULL_TENANT = "full_tenant"
    DISPLACED = "displaced"
    PROMISE = "promise"
    LATE = "late"


_FULL = {Full.LINE: Reason.FULL_LINE, Full.TENANT: Reason.FULL_TENANT}


@dataclass(frozen=True)
class Refused:
    """A refusal. `after_s`: when the same request would be admitted without other arrivals; None: unknown."""

    reason: Reason
    after_s: float | None


class Admission:
    def __init__(self, limits: QueueLimits) -> None:
        self._queue = RequestQueue(limits)
        self._forecast = Forecast()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiting]:
        """All waiting requests, in the order of their arrival."""
        return iter(self._queue)

    def backlog(self) -> dict[Priority, Backlog]:
        """The waiting requests of each priority."""
        return self._queue.backlog()

    def arrive(self, terms: RequestTerms, now_s: float, refuses: bool = True) -> Joined | Refused:
        """Let a new request join the queue, perhaps in another request's place, or refuse it. `refuses`: also
        refuse it when its promise would be broken."""
        self._forecast.asked(terms, now_s)
        wait_s = self._forecast.wait_s(self._queue, terms, now_s)
        if refuses and (terms.ttft_s is not None or terms.deadline_s is not None):
            after_s = retry_after_s(self._forecast.ttft_s(self._queue, terms, wait_s, now_s), terms)
            if after_s is not None:
                return Refused(Reason.PROMISE, after_s)
        joined = self._queue.add(terms, now_s)
        if isinstance(joined, Full):
            return Refused(_FULL[joined], self.turn_s(terms))
        if joined.displaced is not None:
            self._forecast.left(joined.displaced.number)
        self._forecast.joined(self._queue, joined.waiting, wait_s, now_s)
        return joined

    def turn_s(self, terms: RequestTerms) -> float | None:
        """How long the queue takes to move by a request's tokens; None: unknown."""
        return self._forecast.turn_s(terms)

    def begin(self, now_s: float) -> None:
        """Workers exist again: waiting times are counted from now on."""
        self._forecast.begin(now_s)

    def next(self, now_s: float) -> Waiting | None:
        """The request whose turn it is, which leaves the queue; None if the queue is empty."""
        waiting = self._queue.take(now_s)
        if waiting is not None:
            self._forecast.moved(self._queue, waiting, now_s)
        return waiting

    def drop_late(self, now_s: float) -> list[Waiting]:
        """Remove late requests from the queue if their policy is to drop them."""
        dropped = self._queue.drop_late(now_s)
        for waiting in dropped:
            self._forecast.waited(waiting, now_s)
        return dropped

    def leave(self, number: int) -> bool:
        """Remove a request from the queue without a turn. False: it was not in the queue."""
        self._forecast.left(number)
        return self._queue.remove(number) is not None

    def answered(self, took_s: float, now_s: float) -> None:
        """A request that had waited received its first token `took_s` after its turn."""
        self._forecast.answered(took_s, now_s)


def retry_after_s(ttft_s: float | None, terms: RequestTerms) -> float | None:
    """None: admit the request. Otherwise the seconds after which the same request would be admitted, without
    other arrivals.

    A request is refused if its first token is expected after its TTFT target or its deadline. `ttft_s` None:
    unknown.
    """
    promised = [target for target in (terms.ttft_s, terms.deadline_s) if target is not None]
    if ttft_s is None or not promised or ttft_s <= min(promised):
        return None
    return max(MIN_RETRY_S, ttft_s - min(promised))
