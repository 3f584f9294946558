"""The estimated time left of a job, from the layers it has done."""

from __future__ import annotations

import time


class Clock:
    """Starts when the first of `layers` layers begins; `tick` is called after each layer."""

    def __init__(self, layers: int) -> None:
        self._started, self._layers, self._done = time.monotonic(), layers, 0

    def tick(self) -> None:
        self._done += 1

    def left(self, share: float) -> str:
        """The time left, as ", about 40 s left", with `share` of this layer done; empty until one layer is
        finished.
        """
        if not self._done:
            return ""
        done = self._done + share
        return f", about {duration((time.monotonic() - self._started) / done * (self._layers - done))} left"


def duration(seconds: float) -> str:
    """A duration as text: 12 s, 3 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
