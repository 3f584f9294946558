"""How long a job still takes, from the layers it has done."""

from __future__ import annotations

import time


class Clock:
    """Started when the first of `layers` layers is begun; `tick` when one is finished."""

    def __init__(self, layers: int) -> None:
        self._started, self._layers, self._done = time.monotonic(), layers, 0

    def tick(self) -> None:
        self._done += 1

    def left(self, share: float) -> str:
        """ ", about 40 s left", with `share` of this layer done; empty until one is finished."""
        if not self._done:
            return ""
        done = self._done + share
        return f", about {duration((time.monotonic() - self._started) / done * (self._layers - done))} left"


def duration(seconds: float) -> str:
    """12 s, 3 min, 1.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
