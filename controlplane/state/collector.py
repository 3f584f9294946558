"""Keep Python's collector of cyclic garbage from scanning many records: they contain no cycles, and scanning
100,000 takes half a second, in which nothing else in the process runs."""

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
    """Exclude records from collection permanently when there are MANY more than before. Reference counts
    still free them. Objects that were garbage at that moment stay, which happens too seldom to matter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = 0

    def see(self, records: int, just_read: int) -> None:
        """Note the current number of records, and how many of them were read since the last call."""
        with self._lock:
            due = records >= self._known + MANY
            self._known = records if due else min(self._known, records)
        if due and just_read < MANY:  # otherwise the collection would take that half second
            gc.collect()
        if due:
            gc.freeze()
