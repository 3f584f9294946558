"""The gateway's tenants, kept as new as their file: keys come and go without a restart."""

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

# Of a file, however many links lead to it: which one it is, and when it was changed.
Mark = tuple[int, int, int, int, int]


class TenantsBook:
    """The newest tenants whose file could be read. Errors, at first only: ValueError, as `tenants_of`."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._mark = _mark(settings.tenants)  # before it is read: what changes meanwhile is read again
        self._tenants = tenants_of(settings)
        self._problem = ""
        self._told_s = 0.0

    @property
    def tenants(self) -> Tenants:
        return self._tenants

    async def keep_fresh(self) -> None:
        """Until cancelled. Nothing to do without a file."""
        while self._settings.tenants:
            await asyncio.sleep(CHECK_S)
            try:
                await asyncio.to_thread(self.refresh)
            except Exception:
                log.exception("the tenants could not be looked at; those known stay")

    def refresh(self) -> None:
        """Read the file, if it is another one than was read last. One that is wrong changes nothing."""
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
        log.warning("the tenants were read anew: %d keys", len(self._tenants.by_key))

    def _complain(self, problem: str) -> None:
        """At once, and as long as it lasts."""
        if problem != self._problem or self._clock() - self._told_s >= REMIND_S:
            self._problem, self._told_s = problem, self._clock()
            log.error(
                "%s; the tenants and keys that were read before STAY IN FORCE, also those taken out since: "
                "mend the file",
                problem,
            )


def _mark(path: str) -> Mark | None:
    """None where there is no such file. Links are followed: a kubelet exchanges the folder behind one."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
