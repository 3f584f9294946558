"""Requests that were refused, as demand: each counts for as long as one that was answered takes.

Without that a host whose requests are refused would look less busy the more it lacks engines.
"""

from __future__ import annotations

import asyncio

from controlplane.gateway.time_average import TimeAverage

FIRST_GUESS_S = 1.0
LEAST_S, MOST_S = 0.1, 30.0


class RefusedDemand:
    """Adds at most `most` at a time to `demand`."""

    def __init__(self, demand: TimeAverage, most: int) -> None:
        self._demand = demand
        self._most = most
        self._count = 0
        self._mean_s = FIRST_GUESS_S

    def took(self, seconds: float) -> None:
        """A request was answered after so long."""
        self._mean_s += (min(MOST_S, seconds) - self._mean_s) / 16

    def add(self) -> None:
        """One was refused, now."""
        if self._count >= self._most:
            return
        self._count += 1
        self._demand.add(1)
        asyncio.get_running_loop().call_later(max(LEAST_S, self._mean_s), self._forget)

    def _forget(self) -> None:
        self._count -= 1
        self._demand.add(-1)
