"""What a gateway knows of one host's workers: their addresses, and the requests that it has sent them.

Workers come and go (restarts, replicas). The workers of a host in use are looked up every REFRESH_S, and at
once when none is known. Requests that need them at the same time share one answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from controlplane import errors
from controlplane.gateway.http1 import Connection, Pool
from controlplane.gateway.load_reader import LoadReader
from controlplane.gateway.routing_policy import has_room, least_outstanding
from controlplane.gateway.time_average import TimeAverage
from workers.messages import WorkerLoad, WorkerReport

log = logging.getLogger(__name__)

Find = Callable[[str], Awaitable[list[WorkerReport]]]
Alive = Callable[[str], bool]

REFRESH_S = 2.0
# After so long without a request the workers of a host are not looked up until the next one.
IDLE_S = 60.0
# Between two looks for a worker while there is none.
RETRY_S = 0.2
# Longest wait for a worker: an engine that restarts needs a minute on a CPU.
WAIT_S = 120.0
RESTART_HINT_S = 5.0


@dataclass(eq=False)
class KnownWorker:
    """One worker's address, the connections to it, and how many requests of this gateway it has.

    `load` is what it pushed last, at `load_at_s` (time.monotonic); None and long ago if it never did.
    """

    address: str
    secret: str
    max_ongoing: int
    group: str = ""
    outstanding: int = 0
    load: WorkerLoad | None = None
    load_at_s: float = -math.inf

    def __post_init__(self) -> None:
        self.pool = Pool(self.address)
        self._used: set[Connection] = set()
        self._reader: LoadReader | None = None

    def listen(self, on_load: Callable[[KnownWorker, WorkerLoad], None]) -> None:
        """Keep `load` new from now on, and tell `on_load` of each."""

        def take(load: WorkerLoad) -> None:
            self.load, self.load_at_s = load, time.monotonic()
            on_load(self, load)

        self._reader = LoadReader(self.address, self.secret, take)

    def forget(self) -> None:
        """End what runs in the background. Requests under way go on."""
        self.pool.close()
        if self._reader is not None:
            self._reader.close()

    def cut(self) -> None:
        """End the requests that it has. They fail with BrokenOff."""
        for connection in self._used:
            connection.abort()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for one request; closed unless its answer is read to the end. Raises NotConnected."""
        self.outstanding += 1
        try:
            connection = await self.pool.take()
            self._used.add(connection)
            try:
                yield connection
            finally:
                self._used.discard(connection)
                self.pool.give_back(connection)
        finally:
            self.outstanding -= 1


class HostWorkers:
    """The workers of one host. `find` asks them for their reports.

    Requests in groups that are not `alive` any more are cut off: their node may have vanished without a word.
    """

    def __init__(self, host: str, find: Find, max_queued: int, alive: Alive) -> None:
        self._host = host
        self._find = find
        self._max_queued = max_queued
        self._alive = alive
        self._known: list[KnownWorker] = []
        self._left: list[KnownWorker] = []
        self._in_flight = 0
        self._demand = TimeAverage(time.monotonic)
        self._used_s = 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def demand(self) -> float:
        """Clients' requests under way, waiting ones included: the mean since the last call."""
        return self._demand.average()

    @contextmanager
    def admitted(self, counted: bool = True) -> Iterator[None]:
        """Count a request while it is under way, as demand only if it is a client's. Raises Overloaded when
        there are too many."""
        if not has_room(self._in_flight, [w.max_ongoing for w in self._known], self._max_queued):
            raise errors.Overloaded(
                f"too many requests wait for '{self._host}'; send fewer at once or try again", retry_after_s=1
            )
        self._keep_watching()
        self._in_flight += 1
        self._demand.add(int(counted))
        try:
            yield
        finally:
            self._in_flight -= 1
            self._demand.add(-int(counted))

    async def pick(self, deadline_s: float) -> KnownWorker:
        """The worker for a request; awaited until `deadline_s` (the loop's clock). Raises Unavailable."""
        while not self._known:
            if asyncio.get_running_loop().time() >= deadline_s:
                raise errors.Unavailable(
                    f"the engine of '{self._host}' is not there (starting or stopping); try again",
                    retry_after_s=RESTART_HINT_S,
                )
            await self.refresh()
            if not self._known:
                await asyncio.sleep(RETRY_S)
        return self._known[least_outstanding([w.outstanding for w in self._known], random.random())]

    async def drop(self, worker: KnownWorker) -> None:
        """Forget a worker that does not answer; it comes back with its next report.

        Pauses when it was the last one, so that a worker that reports but cannot be reached is not tried in a
        busy loop.
        """
        self._known = [w for w in self._known if w is not worker]
        self._left.append(worker)
        worker.forget()
        if not self._known:
            await asyncio.sleep(RETRY_S)

    async def refresh(self) -> None:
        """Look the workers up, or wait for a look-up that is under way. Never raises."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        self._cut_dead()
        try:
            reports = await self._find(self._host)
        except Exception as e:  # the known ones stay: a request to one that is gone shows it
            log.info("the workers of %s could not be asked: %s", self._host, e)
            return
        old = {(w.address, w.secret): w for w in self._known}
        self._known = [
            old.get((r.address, r.secret)) or self._met(r)
            for r in reports
            if r.address  # a worker that is stopping has none any more
        ]
        for gone in set(old.values()).difference(self._known):
            gone.forget()
            self._left.append(gone)

    def _met(self, report: WorkerReport) -> KnownWorker:
        worker = KnownWorker(report.address, report.secret, report.max_ongoing_requests, report.group)
        worker.listen(self._heard)
        return worker

    def _heard(self, worker: KnownWorker, load: WorkerLoad) -> None:
        """A worker pushed its load; it is `worker.load` already."""

    def _cut_dead(self) -> None:
        """End requests in groups that are given up, not in groups that are drained."""
        self._left = [w for w in self._left if w.outstanding]
        for worker in (*self._known, *self._left):
            if worker.outstanding and not self._alive(worker.group):
                log.warning("cutting off %d requests in %s, which is lost", worker.outstanding, worker.group)
                worker.cut()

    def _keep_watching(self) -> None:
        self._used_s = asyncio.get_running_loop().time()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while self._in_flight or asyncio.get_running_loop().time() - self._used_s < IDLE_S:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    def close(self) -> None:
        """End the background tasks, and the connections that nobody uses."""
        for worker in self._known:
            worker.forget()
        for task in (self._watching, self._refreshing):
            if task is not None:
                task.cancel()
