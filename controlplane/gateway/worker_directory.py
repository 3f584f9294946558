"""The workers of one base that a gateway knows: current workers, and workers that have left.

Workers come and go (restarts, replicas). `refresh` looks them up; while requests wait and no worker is known,
`seek` looks every RETRY_S. Requests that need workers at the same time share one look-up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from controlplane.gateway.known_worker import KnownWorker
from controlplane.traffic import worker_health
from controlplane.traffic.worker_health import HealthRules
from workers.messages import WorkerLoad, WorkerReport

log = logging.getLogger(__name__)

Find = Callable[[str], Awaitable[list[WorkerReport]]]
Alive = Callable[[str], bool]

# Time between two look-ups while there is no worker.
RETRY_S = 0.2


class Listener(Protocol):
    """The receiver of news about workers."""

    def workers_changed(self, were_known: bool) -> None:
        """`known` is another list; `were_known`: it was not empty before."""

    def loaded(self, worker: KnownWorker, load: WorkerLoad) -> None:
        """A worker pushed its load."""

    def waits(self) -> bool:
        """Whether requests wait. Called before each look-up of `seek`: requests that waited too long end."""


class WorkerDirectory:
    """`find` asks the workers of `base` for their reports. Requests in groups that are no longer `alive` are
    cut off: their node may have vanished without notice."""

    def __init__(self, base: str, find: Find, alive: Alive, rules: HealthRules, listener: Listener) -> None:
        self._base = base
        self._find = find
        self._alive = alive
        self._rules = rules
        self._listener = listener
        self.known: list[KnownWorker] = []
        self._left: list[KnownWorker] = []
        self._lost_s = -math.inf
        self._refreshing: asyncio.Task[None] | None = None
        self._seeking: asyncio.Task[None] | None = None

    def watched(self) -> list[KnownWorker]:
        """The workers whose silence has a meaning. A worker that was told to stop may be silent."""
        return [*self.known, *(worker for worker in self._left if worker.listens)]

    def drop(self, worker: KnownWorker) -> None:
        """Forget a worker that does not answer; it comes back with its next report."""
        if worker not in self.known:
            return
        self._left.append(worker)
        worker.forget()
        self._lost_s = time.monotonic()
        self._set_known([w for w in self.known if w is not worker])

    def seek(self) -> None:
        """Look for workers in the background while requests wait and none is known."""
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._keep_seeking())

    async def _keep_seeking(self) -> None:
        """A worker that reports but cannot be reached is tried every RETRY_S, and not in a busy loop."""
        await asyncio.sleep(max(0.0, self._lost_s + RETRY_S - time.monotonic()))
        while not self.known and self._listener.waits():
            await self.refresh()
            if not self.known:
                await asyncio.sleep(RETRY_S)

    async def refresh(self) -> None:
        """Look the workers up, or wait for a look-up that is under way. Never raises."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        self._cut_dead()
        try:
            reports = await self._find(self._base)
        except Exception as e:  # the known workers stay: a request shows whether its worker is gone
            log.info("the workers of %s did not answer: %s", self._base, e)
            return
        old = {(w.address, w.secret): w for w in self.known}
        known = [
            old.get((r.address, r.secret)) or self._met(r)
            for r in reports
            if r.address  # a stopping worker no longer has an address
        ]
        for gone in set(old.values()).difference(known):
            gone.forget(listen_on=worker_health.is_silent(gone.seen, self._rules))
            self._left.append(gone)
        self._set_known(known)

    def _set_known(self, known: list[KnownWorker]) -> None:
        were_known = bool(self.known)
        self.known = known
        self._listener.workers_changed(were_known)

    def _met(self, report: WorkerReport) -> KnownWorker:
        worker = KnownWorker(
            address=report.address,
            secret=report.secret,
            proof=report.proof,
            local_name=report.local_name,
            max_ongoing=report.max_ongoing_requests,
            group=report.group,
        )
        worker.listen(self._listener.loaded)
        return worker

    def _cut_dead(self) -> None:
        """End requests in groups that were given up, but not in groups that are drained."""
        for worker in self._left:
            if not worker.outstanding:
                worker.forget()
        self._left = [w for w in self._left if w.outstanding]
        for worker in (*self.known, *self._left):
            if worker.outstanding and not self._alive(worker.group):
                log.warning(
                    "the gateway ends %d requests in %s, because that group is lost",
                    worker.outstanding,
                    worker.group,
                )
                worker.cut()

    def close(self) -> None:
        """End the background tasks, and close idle connections."""
        for worker in (*self.known, *self._left):
            worker.forget()
        for task in (self._refreshing, self._seeking):
            if task is not None:
                task.cancel()
