"""Who waits, goes next, is refused or dropped: production's line and its speed, on virtual time.

A request joins when no group has room. From then on there is none until an engine's answer makes some, so the
line is asked only then, and what came or grew late meanwhile is told to it in the order of time.
"""

from __future__ import annotations

import math
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
from controlplane.traffic.admission import LineSpeeds, retry_after_s
from controlplane.traffic.request_terms import RequestTerms
from controlplane.traffic.tenants import Tenant
from controlplane.traffic.waiting_line import Full, LineLimits, WaitingLine

Terms = Callable[[int], RequestTerms]

_FULL = {Full.LINE: LINE_FULL, Full.TENANT: TENANT_FULL}
_PRIORITIES = list(Priority)


class Admitting:
    """`terms` of a request by its number. `refuses`: newcomers whose promise of TTFT the line would break."""

    def __init__(self, world: World, terms: Terms, limits: LineLimits, refuses: bool = True) -> None:
        self._terms, self._refuses = terms, refuses
        # Plain arrays: a field of a record takes several times as long to reach.
        self._arrival_s = world.asked["arrival_s"]
        self._state, self._reason = world.outcomes["state"], world.outcomes["reason"]
        self._now_s, self._coming, self._unseen, self._length, self._longest, self._room = (
            world.gateway[name] for name in ("now_s", "coming", "unseen", "length", "longest", "room")
        )
        self._line = WaitingLine(limits)
        self._speeds = LineSpeeds()
        self._numbers: dict[int, int] = {}  # of requests, by their numbers in the line

    def catch_up(self, passing: npt.NDArray[np.int32]) -> int:
        """What has happened until now; then those that may go are put into `passing`. How many."""
        now_s, end = float(self._now_s[0]), int(self._coming[0])
        for i in range(int(self._unseen[0]), end):
            self._arrive(i)
        self._unseen[0] = end
        self._drop_late(now_s)
        count = min(len(passing), int(self._room[0]))
        sent = [self._next(now_s) for _ in range(min(count, len(self._line)))]
        passing[: len(sent)] = sent
        self._length[0] = len(self._line)
        return len(sent)

    def _arrive(self, i: int) -> None:
        now_s, terms, line = float(self._arrival_s[i]), self._terms(i), self._line
        self._drop_late(now_s)
        if self._refuses and retry_after_s(self._speeds.wait_s(line, terms), terms) is not None:
            self._turn_away(i, REFUSED, WOULD_BE_LATE)
            return
        joined = line.add(terms, now_s)
        if isinstance(joined, Full):
            self._turn_away(i, REFUSED, _FULL[joined])
            return
        self._speeds.joined(line, terms, now_s)
        self._numbers[joined.waiting.number] = i
        self._state[i] = IN_LINE
        self._longest[0] = max(self._longest[0], len(line))
        if joined.displaced is not None:
            self._turn_away(self._numbers.pop(joined.displaced.number), REFUSED, DISPLACED)

    def _drop_late(self, now_s: float) -> None:
        for late in self._line.drop_late(now_s):
            self._turn_away(self._numbers.pop(late.number), DROPPED, LATE)

    def _next(self, now_s: float) -> int:
        waiting = self._line.take(now_s)
        assert waiting is not None
        self._speeds.moved(waiting.terms, now_s)
        return self._numbers.pop(waiting.number)

    def _turn_away(self, i: int, state: int, reason: int) -> None:
        assert self._state[i] != SENT
        self._state[i], self._reason[i] = state, reason


def admit_all(world: World) -> Admitting:
    """Nobody is refused. Terms are those of the records, without a deadline."""
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

    return Admitting(world, terms, LineLimits(len(world.asked) + 1), refuses=False)


def expected_tokens(prompt: float, output: float) -> int:
    """What the gateway takes a request to cost."""
    return max(1, round(float(prompt) + float(output)))


def _limit(seconds: float) -> float | None:
    return float(seconds) if math.isfinite(seconds) else None
