"""Which requests wait, go next, are refused or dropped: production's admission, on virtual time.

A request joins the queue when no group has room. From then on only an engine's answer makes room, so the
queue is asked only then. It then gets all arrivals and late requests since, in the order of time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from controlplane.simulation.world import (
    DISPLACED,
    DROPPED,
    IN_LINE,
    LATE,
    LINE_FULL,
    REFUSED,
    SENT,
    TENANT_FULL,
    WOULD_BE_LATE,
    World,
)
from controlplane.state.terms import Priority
from controlplane.traffic.admission import Admission, Reason, Refused
from controlplane.traffic.request_queue import QueueLimits
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant

Terms = Callable[[int], RequestTerms]

_REASONS = {
    Reason.PROMISE: WOULD_BE_LATE,
    Reason.FULL_LINE: LINE_FULL,
    Reason.FULL_TENANT: TENANT_FULL,
}
_PRIORITIES = list(Priority)


class Admitting:
    """`terms` gives a request's terms by its number. `refuses`: whether new requests are refused if the queue
    would break their promise of TTFT."""

    def __init__(self, world: World, terms: Terms, limits: QueueLimits, refuses: bool = True) -> None:
        self._terms, self._refuses = terms, refuses
        # Plain arrays: accessing a field of a record takes several times as long.
        self._arrival_s = world.asked["arrival_s"]
        self._sent_s, self._first_s = world.outcomes["sent_s"], world.outcomes["first_s"]
        self._state, self._reason = world.outcomes["state"], world.outcomes["reason"]
        self._now_s, self._coming, self._unseen, self._length, self._longest, self._room = (
            world.gateway[name] for name in ("now_s", "coming", "unseen", "length", "longest", "room")
        )
        self._admission = Admission(limits)
        self._without_first: deque[int] = deque()  # requests after their turn, without a first token yet
        self._numbers: dict[int, int] = {}  # request numbers by the numbers in the queue

    def catch_up(self, passing: npt.NDArray[np.int32]) -> int:
        """Process all events until now, then put the requests that may go into `passing`. Returns their
        number."""
        now_s, end = float(self._now_s[0]), int(self._coming[0])
        for i in range(int(self._unseen[0]), end):
            self._see_first_tokens(float(self._arrival_s[i]), False)
            self._arrive(i)
        self._unseen[0] = end
        self._see_first_tokens(now_s, True)
        self._drop_late(now_s)
        count = min(len(passing), int(self._room[0]))
        sent = [self._next(now_s) for _ in range(min(count, len(self._admission)))]
        passing[: len(sent)] = sent
        self._length[0] = len(self._admission)
        return len(sent)

    def _arrive(self, i: int) -> None:
        now_s = float(self._arrival_s[i])
        self._drop_late(now_s)
        joined = self._admission.arrive(self._terms(i), now_s, self._refuses)
        if isinstance(joined, Refused):
            self._turn_away(i, REFUSED, _REASONS[joined.reason])
            return
        self._numbers[joined.waiting.number] = i
        self._state[i] = IN_LINE
        self._longest[0] = max(self._longest[0], len(self._admission))
        if joined.displaced is not None:
            self._turn_away(self._numbers.pop(joined.displaced.number), REFUSED, DISPLACED)

    def _drop_late(self, now_s: float) -> None:
        for late in self._admission.drop_late(now_s):
            self._turn_away(self._numbers.pop(late.number), DROPPED, LATE)

    def _next(self, now_s: float) -> int:
        waiting = self._admission.next(now_s)
        assert waiting is not None
        i = self._numbers.pop(waiting.number)
        self._without_first.append(i)
        return i

    def _see_first_tokens(self, until_s: float, included: bool) -> None:
        """Note first tokens of requests after their turn, in that order: a request without one hides later
        ones."""
        while self._without_first:
            i = self._without_first[0]
            first_s = float(self._first_s[i])
            if not 0.0 < first_s <= until_s or (first_s == until_s and not included):
                return
            self._without_first.popleft()
            self._admission.answered(first_s - float(self._sent_s[i]), first_s)

    def _turn_away(self, i: int, state: int, reason: int) -> None:
        assert self._state[i] != SENT
        self._state[i], self._reason[i] = state, reason


def admit_all(world: World) -> Admitting:
    """Admission that refuses no request. Terms come from the records, without a deadline."""
    tenants = {int(number): Tenant(str(number)) for number in np.unique(world.asked["tenant"])}

    def terms(i: int) -> RequestTerms:
        asked = world.asked[i]
        return RequestTerms(
            ttft_s=_limit(asked["ttft_s"]),
            tpot_s=_limit(asked["tpot_s"]),
            priority=_PRIORITIES[int(asked["priority"])],
            tenant=tenants[int(asked["tenant"])],
            tokens=expected_tokens(asked["prompt"], asked["expected"]),
        )

    return Admitting(world, terms, QueueLimits(len(world.asked) + 1), refuses=False)


def expected_tokens(prompt: float, output: float) -> int:
    """The tokens that the gateway assumes as a request's cost."""
    return max(1, round(float(prompt) + float(output)))


def _limit(seconds: float) -> float | None:
    return float(seconds) if math.isfinite(seconds) else None
