"""The average over time of a number that rises and falls."""

from __future__ import annotations

from collections.abc import Callable


class TimeAverage:
    """The number begins at 0. `clock` gives seconds, and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = 0
        self._area = 0.0  # up to `_changed_s`
        self._begun_s = self._changed_s = clock()

    def add(self, change: int) -> None:
        self._measure()
        self.now += change

    def average(self) -> float:
        """The mean since the last call."""
        self._measure()
        took_s = self._changed_s - self._begun_s
        mean = self._area / took_s if took_s > 0 else float(self.now)
        self._begun_s, self._area = self._changed_s, 0.0
        return mean

    def _measure(self) -> None:
        now_s = self._clock()
        self._area += self.now * (now_s - self._changed_s)
        self._changed_s = now_s
