"""The gateway's tenants, kept current with their file: keys change without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from controlplane.gateway.tenants_file import tenants_of
from controlplane.settings import Settings
from controlplane.traffic.tenants import Tenants

log = logging.getLogger(__name__)

CHECK_S = 1.0
REMIND_S = 60.0

# The identity of a file (after following links), and the time of its last change.
Mark = tuple[int, int, int, int, int]


class TenantsBook:
    """The tenants of the last readable file. Errors, only at the start: ValueError, as `tenants_of`."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._mark = _mark(settings.tenants)  # before the file is read, so that later changes are read again
        self._tenants = tenants_of(settings)
        self._problem = ""
        self._told_s = 0.0

    @property
    def tenants(self) -> Tenants:
        return self._tenants

    async def keep_fresh(self) -> None:
        """Refresh until cancelled. Does nothing without a file."""
        while self._settings.tenants:
            await asyncio.sleep(CHECK_S)
            try:
                await asyncio.to_thread(self.refresh)
            except Exception:
                log.exception("the file of tenants could not be read; the known tenants stay in force")

    def refresh(self) -> None:
        """Read the file if it has changed. An invalid file changes nothing."""
        mark = _mark(self._settings.tenants)
        if mark == self._mark and not self._problem:
            return
        self._mark = mark
        try:
            self._tenants = tenants_of(self._settings)
        except ValueError as e:
            self._complain(str(e))
            return
        self._problem = ""
        log.warning("the file of tenants was read again: %d keys", len(self._tenants.by_key))

    def _complain(self, problem: str) -> None:
        """Log a problem at once, and repeatedly while it lasts."""
        if problem != self._problem or self._clock() - self._told_s >= REMIND_S:
            self._problem, self._told_s = problem, self._clock()
            log.error(
                "%s; the tenants and keys read before STAY IN FORCE, including those deleted since: correct "
                "the file",
                problem,
            )


def _mark(path: str) -> Mark | None:
    """The file's mark; None if it does not exist. Links are followed: a kubelet replaces the folder behind
    one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
