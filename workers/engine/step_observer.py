"""The times of an engine's steps, added up as they are observed.

Sums only grow, so each reader can compute the increase since its last read.

Sums are meant to show the pace of ordinary steps. So invalid times are ignored. A step that took many times
as long as the last ones (the machine was paused, a graph was compiled) counts as MOST times the usual.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REMEMBERED = 31  # steps; a new pace becomes the usual one after half as many
MOST = 4.0
LONGEST_S = 3600.0  # a longer time measured something else


@dataclass(frozen=True)
class Sums:
    """Sums since the engine started: steps and prompts as in `workers.messages.WorkerLoad`, and their
    seconds.
    """

    steps: int = 0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0


class StepObserver:
    """The observer of one engine. `changed` is called, in the observing loop, after each change."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.changed: Callable[[], None] = _nobody
        self._steps, self._prefill_tokens = 0, 0
        self._decode_s, self._prefill_s = 0.0, 0.0
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def sums(self) -> Sums:
        return Sums(self._steps, self._decode_s, self._prefill_tokens, self._prefill_s)

    def requests(self, running: int, waiting: int, kv_usage: float) -> None:
        """Record the engine's current state; `kv_usage` is a share."""
        self.running, self.waiting = max(0, running), max(0, waiting)
        self.kv_usage = min(1.0, max(0.0, kv_usage)) if math.isfinite(kv_usage) else self.kv_usage
        self.changed()

    def step(self, gaps_s: Sequence[float]) -> None:
        """Record one step from the seconds since the last token of each decoding row.

        All rows waited for the same step, except rows that were stopped in between, so the median counts.
        """
        known = [gap_s for gap_s in gaps_s if _is_time(gap_s)]
        if known:
            self.steps(1, statistics.median(known))

    def steps(self, count: int, step_s: float) -> None:
        """Record `count` steps, which took `step_s` each."""
        if count <= 0 or not _is_time(step_s):
            return
        counted_s = step_s if not self._last else min(step_s, MOST * statistics.median(self._last))
        self._last.append(step_s)
        self._steps += count
        self._decode_s += count * counted_s
        self.changed()

    def prefill(self, tokens: int, seconds: float) -> None:
        """Record a prompt of which `tokens` were computed in `seconds`."""
        if tokens <= 0 or not _is_time(seconds):
            return
        self._prefill_tokens += tokens
        self._prefill_s += seconds
        self.changed()


def _is_time(seconds: float) -> bool:
    return 0.0 < seconds < LONGEST_S


def _nobody() -> None:
    """Does nothing: no listener is set."""
