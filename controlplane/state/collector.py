"""Python's collector of cyclic garbage, kept from many records: there are no cycles in them, and it takes
half a second for 100,000, in which nobody else in the process runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # records


class Paused:
    """`with paused():` nothing is collected meanwhile, whichever of several threads ends first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._was_enabled = 0, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._was_enabled:
                    gc.enable()


paused = Paused()


class LeftAlone:
    """Has the collector leave records alone for good when there are MANY more than there were. They go by
    their count of references. What was garbage just then stays, which is so seldom that it is not much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = 0

    def see(self, records: int, just_read: int) -> None:
        """There are so many records now, of which so many were read since the last time."""
        with self._lock:
            due = records >= self._known + MANY
            self._known = records if due else min(self._known, records)
        if due and just_read < MANY:  # else it would take that half second
            gc.collect()
        if due:
            gc.freeze()
