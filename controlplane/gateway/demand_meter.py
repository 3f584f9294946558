"""The number of clients' requests under way for one base, as input for the autoscaler.

A refused request counts for as long as an answered one takes. Otherwise a base would look less busy the more
engines it lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controlplane.gateway.time_average import TimeAverage
from controlplane.traffic.request import InferenceRequest

FIRST_GUESS_S = 1.0
MIN_S, MAX_S = 0.1, 30.0


class DemandMeter:
    """Requests that are not `counted` (probes) are no demand. At most `max_refused` refused requests count at
    a time."""

    def __init__(self, clock: Callable[[], float], max_refused: int) -> None:
        self._demand = TimeAverage(clock)
        self._max_refused = max_refused
        self._refused = 0
        self._mean_s = FIRST_GUESS_S
        self.in_flight = 0  # probes included

    def average(self) -> float:
        """The mean since the last call, in sequences, waiting and just refused requests included."""
        return self._demand.average()

    @property
    def now(self) -> int:
        """Sequences under way at present."""
        return self._demand.now

    def begin(self, request: InferenceRequest) -> None:
        self.in_flight += 1
        if request.counted:
            self._demand.add(request.terms.sequences)

    def end(self, request: InferenceRequest, refused: bool) -> None:
        self.in_flight -= 1
        if request.counted:
            if refused:
                self._count_refused()
            self._demand.add(-request.terms.sequences)

    def answered(self, seconds: float) -> None:
        """A request was answered after `seconds`."""
        self._mean_s += (min(MAX_S, seconds) - self._mean_s) / 16

    def _count_refused(self) -> None:
        if self._refused >= self._max_refused:
            return
        self._refused += 1
        self._demand.add(1)
        asyncio.get_running_loop().call_later(max(MIN_S, self._mean_s), self._forget)

    def _forget(self) -> None:
        self._refused -= 1
        self._demand.add(-1)
