"""Log lines of lasting problems, such as an unreachable store: logged at once, and then once a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0
REPEATED = {"repeated": True}  # `extra` of a line that is logged repeatedly


class Rarely(logging.Filter):
    """A logger's filter: passes each line that is marked with REPEATED once in `every_s`, and then adds
    how often it was left out. Lines are the same when their text is, whatever their arguments."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic, every_s: float = EVERY_S) -> None:
        super().__init__()
        self._clock_s, self._every_s = clock_s, every_s
        self._said: dict[str, tuple[float, int]] = {}  # time of the last line, and lines left out since

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "repeated", False):
            return True
        now_s, text = self._clock_s(), str(record.msg)
        at_s, left_out = self._said.get(text, (float("-inf"), 0))
        if now_s - at_s < self._every_s:
            self._said[text] = at_s, left_out + 1
            return False
        self._said[text] = now_s, 0
        if left_out:
            record.msg = f"{record.getMessage()} (and {left_out} more times since the last such line)"
            record.args = None
        return True
