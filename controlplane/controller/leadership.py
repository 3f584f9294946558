"""Leadership among several controllers: the controller with the store's lease acts, the others stand by.

There is a second controller on the same store when a new cluster replaces an old one, or when a hanging
controller has a successor. The holder renews its lease. Another controller takes the lease when it has
expired, or at once when the holder's process is gone from this machine. Later commits of the old holder are
refused, and it can no longer read: a controller that was stopped for a while does not act on outdated
knowledge.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from controlplane.controller.controller import Controller
from controlplane.errors import Unavailable
from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.state.base import Changes, Entry, Lease, Require, Snapshot, StateStore, Write

log = logging.getLogger(__name__)
log.addFilter(Rarely())

NAME = "controller"
LEASE_S = 10.0
RENEW_S = 2.0
TRY_S = 0.5


class LeasedStore:
    """The store as the holder of `lease` uses it, until `until_s` (CLOCK_BOOTTIME).

    Errors of all methods but `close`: `Unavailable` after that time. A commit: `Fenced` when another process
    has the lease.
    """

    def __init__(self, store: StateStore, lease: Lease, until_s: float) -> None:
        self._store = store
        self._lease = lease
        self.until_s = until_s

    def revision(self) -> int:
        return self._held().revision()

    def snapshot(self, kinds: Sequence[str]) -> Snapshot:
        return self._held().snapshot(kinds)

    def changes(self, kinds: Sequence[str], since: int) -> Changes | None:
        return self._held().changes(kinds, since)

    def get(self, kind: str, key: str) -> Entry | None:
        return self._held().get(kind, key)

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        return self._held().pages(kind)

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        return self._held().commit(writes, lease or self._lease)

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        return self._held().take_lease(name, holder, seconds, gone)

    def release_lease(self, lease: Lease) -> None:
        self._held().release_lease(lease)

    def close(self) -> None:
        self._store.close()

    def _held(self) -> StateStore:
        if _now_s() > self.until_s:
            raise Unavailable("this controller's lease ran out, and another controller may act now")
        return self._store


class Leadership:
    """`run` until cancelled: while this process has the lease, a controller of `make` acts.

    `tell` is told whether it has the lease. The caller closes `store`.
    """

    def __init__(
        self,
        store: StateStore,
        make: Callable[[StateStore], Controller],
        tell: Callable[[bool], None] = lambda leads: None,
    ) -> None:
        self._store = store
        self._make = make
        self._tell = tell
        self._other = ""
        self._process = this_process()  # now, because later no file descriptor may be available
        # A separate thread: the loop's threads may all wait for something slow.
        self._thread = ThreadPoolExecutor(1, "leadership")

    async def run(self) -> None:
        self._tell(False)
        while True:
            holder = f"{self._process} {secrets.token_hex(4)}"  # a new name: no epoch is used twice
            asked_s = _now_s()
            lease = await self._take(holder)
            if lease is None:
                await asyncio.sleep(TRY_S)
                continue
            try:
                await self._lead(lease, asked_s + LEASE_S)
            finally:
                self._tell(False)

    async def _take(self, holder: str) -> Lease | None:
        """Take the lease. Errors: none; an unreachable store gives no lease."""
        try:
            gone = self._other if is_gone(self._other) else None
            lease = await self._ask(holder, gone)
        except Unavailable as e:
            log.warning("the state store cannot be used: %s", e, extra=REPEATED)
            return None
        except (OSError, RuntimeError) as e:  # no file descriptor, or no thread, is available now
            log.warning("the controller cannot ask for the lease: %r", e, extra=REPEATED)
            return None
        if lease.holder == holder:
            return lease
        if lease.holder != self._other:
            log.info("this controller stands by: the controller of process %s acts", lease.holder)
        self._other = lease.holder
        return None

    def _ask(self, holder: str, gone: str | None = None) -> asyncio.Future[Lease]:
        take = self._store.take_lease
        return asyncio.get_running_loop().run_in_executor(self._thread, take, NAME, holder, LEASE_S, gone)

    async def _lead(self, lease: Lease, until_s: float) -> None:
        """Act until the store holds another lease. Raises RuntimeError when the controller ends before."""
        log.info("this controller acts, with epoch %d of the lease", lease.epoch)
        store = LeasedStore(self._store, lease, until_s)
        acting = asyncio.create_task(self._make(store).run())
        held = lease
        self._tell(True)
        try:
            while (held := await self._renewed(lease, store)) == lease:
                await asyncio.wait({acting}, timeout=RENEW_S)
                if acting.done():
                    cause = None if acting.cancelled() else acting.exception()
                    raise RuntimeError("the controller ended") from cause
            log.warning("%s", _loss_of(lease, held))
            store.until_s = 0.0
        finally:
            acting.cancel()
            await asyncio.wait({acting})  # it undoes what it has begun, while the lease is still its own
            store.until_s = 0.0
            self._release(held if held.holder == lease.holder else lease)

    async def _renewed(self, lease: Lease, store: LeasedStore) -> Lease:
        """Renew the lease, and return the lease that the store holds then. An unreachable store gives it to
        no process; running actions continue meanwhile, and nothing new begins after the lease has expired."""
        asked_s = _now_s()
        try:
            now = await self._ask(lease.holder)
        except (Unavailable, OSError, RuntimeError) as e:
            log.warning("the lease could not be renewed: %s", e, extra=REPEATED)
            return lease
        store.until_s = asked_s + LEASE_S
        return now

    def _release(self, lease: Lease) -> None:
        """Release the lease, so that the next holder need not wait. In an unreachable store it expires."""
        with suppress(Unavailable, OSError):
            self._store.release_lease(lease)


def _loss_of(lease: Lease, now: Lease) -> str:
    """Why a controller that had `lease` no longer acts, if the store holds the lease `now`."""
    if now.holder == lease.holder:
        return (
            f"the state store no longer had epoch {lease.epoch} of this controller's lease: the store was "
            "emptied or replaced; this controller takes the lease again"
        )
    return f"the controller of process {now.holder} acts now; this controller stands by"


def _now_s() -> float:
    """The time of a clock that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def this_process() -> str:
    """A unique name of a process on this machine: boot id, namespace, process id and start time."""
    return f"{_machine()} {os.getpid()} {_started(os.getpid())}"


def is_gone(holder: str) -> bool:
    """Whether the process named by `this_process` has ended. False if that cannot be known from here."""
    boot, namespace, pid, started, *_ = [*holder.split(), "", "", "", ""]
    if f"{boot} {namespace}" != _machine() or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    """The process's start in clock ticks after the machine's; "": it does not exist, or has only an exit
    status.

    Errors: OSError if that cannot be known, for example without a free file descriptor.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
