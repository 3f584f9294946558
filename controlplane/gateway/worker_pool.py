"""What a gateway knows of one host's workers: their addresses, and the requests that it has sent them.

Workers come and go (restarts, replicas). The workers of a host in use are looked up every REFRESH_S, and at
once when none is known. Requests that need them at the same time share one answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane import errors
from controlplane.gateway import own_requests, read_ahead, warming
from controlplane.gateway.engine_limits import LOOK_S, EngineLimits, no_sign
from controlplane.gateway.http1 import Connection, Moved, Pool
from controlplane.gateway.load_reader import LoadReader
from controlplane.gateway.own_requests import Verdict
from controlplane.gateway.refused_demand import RefusedDemand
from controlplane.gateway.time_average import TimeAverage
from controlplane.gateway.turnstile import Turnstile
from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.traffic import worker_health
from controlplane.traffic.host_router import (
    Asked,
    Flight,
    HostRouter,
    Member,
    RoutingRules,
    StepModels,
)
from controlplane.traffic.worker_health import Seen, Takes
from workers import request_headers
from workers.messages import VariantRef, WorkerLoad, WorkerReport

log = logging.getLogger(__name__)
log.addFilter(Rarely())

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


@dataclass(eq=False, kw_only=True)
class KnownWorker(Member):
    """One worker's address, the connections to it, and how many requests of this gateway it has.

    `load` is what it pushed last, at `load_at_s` (time.monotonic); None and long ago if it never did. `seen`
    is what is known of its health; `is_asked`, whether a harmless request to learn that is under way; `good`,
    how many answers said nothing against it; `unloaded`, variants that it could not load since it last
    answered one. `held` are variants in its memory, and `told_s` is when it was told last to read one.
    """

    address: str
    secret: str = field(repr=False)
    proof: str = field(default="", repr=False)
    outstanding: int = 0
    load: WorkerLoad | None = field(default=None, repr=False)
    load_at_s: float = -math.inf
    seen: Seen = field(default_factory=Seen)
    is_asked: bool = False
    good: int = 0
    unloaded: set[int] = field(default_factory=set, repr=False)
    held: frozenset[int] = frozenset()
    told_s: float = -math.inf
    listens: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.name = self.address
        self.pool = Pool(self.address)
        self._used: set[Connection] = set()
        self._reader: LoadReader | None = None

    def listen(self, on_load: Callable[[KnownWorker, WorkerLoad], None]) -> None:
        """Keep `load` new from now on, and tell `on_load` of each."""

        def take(load: WorkerLoad) -> None:
            if self.load is None or self.load.variants != load.variants:
                self.held = frozenset(uid for uid, _ in load.variants)
            self.load, self.load_at_s = load, time.monotonic()
            if self.seen.quiet != 0:
                self.seen = worker_health.told(self.seen)
            on_load(self, load)

        self._reader = LoadReader(self.address, self.secret, take, self.proof)
        self.listens = True

    def forget(self, listen_on: bool = False) -> None:
        """End what runs in the background. Requests under way go on. `listen_on`: for its load, until
        the next call without."""
        self.pool.close()
        if self._reader is not None and not listen_on:
            self._reader.close()
            self.listens = False

    def cut(self) -> None:
        """End the requests that it has. They fail with BrokenOff."""
        for connection in self._used:
            connection.abort()

    def move(self) -> None:
        """Have those requests that it has not begun to answer go elsewhere: they fail with Moved."""
        for connection in self._used:
            if connection.may_move and not connection.has_begun:
                connection.end(Moved())

    def give_up(self, error: errors.OstinatoError) -> None:
        """End those that it has begun to answer, with this error. The others may yet have an answer."""
        for connection in self._used:
            if connection.has_begun:
                connection.end(error)

    async def take(self) -> Connection:
        """A connection for one request, to be given back in any case. Raises NotConnected."""
        self.outstanding += 1
        try:
            connection = await self.pool.take()
        except BaseException:
            self.outstanding -= 1
            raise
        self._used.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next request; close it unless its answer was read to the end."""
        self.outstanding -= 1
        self._used.discard(connection)
        self.pool.give_back(connection)


class HostWorkers:
    """The workers of one host. `find` asks them for their reports. At most `max_queued` requests wait.

    Requests in groups that are not `alive` any more are cut off: their node may have vanished without a word.
    """

    def __init__(
        self, host: str, find: Find, max_queued: int, alive: Alive, rules: RoutingRules, limits: EngineLimits
    ) -> None:
        self._host = host
        self.limits = limits
        self._find = find
        self._alive = alive
        self.router = HostRouter(rules, time.monotonic(), warming.is_ready())
        self.turnstile = Turnstile(host, self.router, max_queued, time.monotonic)
        self._known: list[KnownWorker] = []
        self._left: list[KnownWorker] = []
        self._in_flight = 0
        self._demand = TimeAverage(time.monotonic)
        self._refused = RefusedDemand(self._demand, max_queued)
        self._used_s = 0.0
        self._lost_s = self._taken_s = -math.inf
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._seeking: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._wanted = read_ahead.Wanted()

    def demand(self) -> float:
        """Clients' requests under way, waiting ones and those just refused included: the mean since the last
        call."""
        return self._demand.average()

    def begin(self, asked: Asked) -> None:
        """Count a request until it ends, as demand only if it is a client's."""
        self._keep_watching()
        self._in_flight += 1
        if asked.counted:
            self._demand.add(asked.terms.sequences)

    def end(self, asked: Asked, refused: bool) -> None:
        """One that is refused counts for as long as others take, or nobody would add engines for it."""
        self._in_flight -= 1
        if asked.counted:
            if refused:
                self._refused.add()
            self._demand.add(-asked.terms.sequences)

    def learn(self, models: StepModels) -> None:
        """What steps take, from now on."""
        self.router.learn(models)
        self.turnstile.pump()

    def at_once(self, asked: Asked, went: bool) -> Flight | None:
        """As `enter`, if the request need not wait."""
        return self.turnstile.at_once(asked, went)

    async def enter(self, asked: Asked, went: bool, variant: VariantRef | None = None) -> Flight:
        """Wait until the request is a worker's, which `Flight.member` is. `went`: it was one's that was not
        there. Meanwhile its variant is read. Errors: those of `Turnstile.enter`; Unavailable when no worker
        came within WAIT_S."""
        if not self._known:
            self._seek()
        if variant is None:
            return await self.turnstile.enter(asked, went)
        return await self.turnstile.enter(asked, went, lambda: self._read_ahead(variant))

    def _read_ahead(self, variant: VariantRef) -> None:
        """Have a variant that no worker has in memory read by one; its load then says that it has it."""
        now_s = time.monotonic()
        if not self._wanted.is_new(variant.uid, now_s):
            return
        worker = read_ahead.reader(self._known, variant.uid)
        if worker is not None:
            self._wanted.told(variant.uid, now_s)
            worker.told_s = now_s
            self._in_background(own_requests.tell_wanted(worker, variant))

    def taken(self) -> None:
        """A worker took a request."""
        self._taken_s = time.monotonic()

    def ended(self, flight: Flight, tokens: int | None) -> None:
        """A request is its worker's no more; `tokens` as `HostRouter.ended`. Who waits may go."""
        self.router.ended(flight, tokens)
        if tokens is not None:
            self._refused.took(time.monotonic() - flight.asked.arrived_s)
        self.turnstile.pump()

    def answered(self, worker: KnownWorker, status: int, fault: bytes = b"", variant: int = 0) -> None:
        """A worker's answer to a request of a variant (0: of the base) began, with this status and fault."""
        if fault == request_headers.OF_LOADING:
            self._could_not_load(worker, variant)
        elif status >= 500 or fault:
            worker.seen = worker_health.erred(worker.seen)
            self._ask_in_doubt(worker)
        else:
            self._did_well(worker, variant)

    def _could_not_load(self, worker: KnownWorker, variant: int) -> None:
        """Of one variant it may be the disk that it lies on; of several it is the worker, or its node."""
        worker.unloaded.add(variant)
        if len(worker.unloaded) > 1:
            self.failed(worker)

    def _did_well(self, worker: KnownWorker, variant: int) -> None:
        worker.good += 1
        if variant:
            worker.unloaded.clear()
        if worker.seen.failures or worker.seen.errors or not worker.seen.is_proven:
            worker.seen = worker_health.answered(worker.seen)
            self._judge()

    def failed(self, worker: KnownWorker) -> None:
        """A worker's request broke off, or had nothing in time."""
        worker.seen = worker_health.failed(worker.seen, self.limits.rules)
        self._judge()

    def _ask_in_doubt(self, worker: KnownWorker) -> None:
        rules = self.limits.rules
        if worker.is_asked or worker not in self._known or not worker_health.is_doubtful(worker.seen, rules):
            return
        worker.is_asked = True
        self._in_background(self._ask(worker))

    def _in_background(self, asking: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(asking)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, worker: KnownWorker) -> None:
        """Whether it is its requests that fail, or the engine."""
        good, in_a_row = worker.good, worker.seen.errors
        try:
            found = await own_requests.verdict(worker, self._host, self.limits.first_byte_s)
        finally:
            worker.is_asked = False
        log.warning(
            "%s of %s answered %d requests in a row that it failed; a harmless one found it %s",
            *(worker.name, self._host, in_a_row, found.name),
            extra=REPEATED,
        )
        if found is Verdict.GONE:
            self.drop(worker)
        elif found is Verdict.WELL or worker.good == good:  # else real answers came, which say more
            worker.seen = worker_health.asked(worker.seen, self.limits.rules, found is Verdict.WELL)
            self._judge()

    def drop(self, worker: KnownWorker) -> None:
        """Forget a worker that does not answer; it comes back with its next report."""
        if worker not in self._known:
            return
        self._left.append(worker)
        worker.forget()
        self._lost_s = time.monotonic()
        self._set_known([w for w in self._known if w is not worker])

    def _set_known(self, known: Sequence[KnownWorker]) -> None:
        there_were = bool(self._known)
        self._known = list(known)
        self.router.set_members(self._known)
        if self._known and not there_were:
            self.turnstile.begin()
        elif self._known:
            self.turnstile.pump()
        elif len(self.turnstile):
            self._seek()

    def _heard(self, worker: KnownWorker, load: WorkerLoad) -> None:
        """A worker pushed its load."""
        self.router.loaded(worker, load, time.monotonic())
        self.turnstile.pump()

    # --- looking for workers -------------------------------------------------------------------------------

    def _seek(self) -> None:
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._keep_seeking())

    async def _keep_seeking(self) -> None:
        """While requests wait and no worker is known. One that reports but cannot be reached is tried every
        RETRY_S, and not in a busy loop."""
        await asyncio.sleep(max(0.0, self._lost_s + RETRY_S - time.monotonic()))
        while not self._known and len(self.turnstile):
            self._expire()
            await self.refresh()
            if not self._known:
                await asyncio.sleep(RETRY_S)

    def _expire(self) -> None:
        before_s = time.monotonic() - WAIT_S
        if self._taken_s < before_s:
            self.turnstile.expire(before_s, self._not_there)

    def _not_there(self) -> errors.Unavailable:
        return errors.Unavailable(
            f"the engine of '{self._host}' is not there (starting or stopping); try again",
            retry_after_s=RESTART_HINT_S,
        )

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
        known = [
            old.get((r.address, r.secret)) or self._met(r)
            for r in reports
            if r.address  # a worker that is stopping has none any more
        ]
        for gone in set(old.values()).difference(known):
            gone.forget(listen_on=worker_health.is_silent(gone.seen, self.limits.rules))
            self._left.append(gone)
        self._set_known(known)

    def _met(self, report: WorkerReport) -> KnownWorker:
        worker = KnownWorker(
            address=report.address,
            secret=report.secret,
            proof=report.proof,
            max_ongoing=report.max_ongoing_requests,
            group=report.group,
        )
        worker.listen(self._heard)
        return worker

    def _cut_dead(self) -> None:
        """End requests in groups that are given up, not in groups that are drained."""
        for worker in self._left:
            if not worker.outstanding:
                worker.forget()
        self._left = [w for w in self._left if w.outstanding]
        for worker in (*self._known, *self._left):
            if worker.outstanding and not self._alive(worker.group):
                log.warning("cutting off %d requests in %s, which is lost", worker.outstanding, worker.group)
                worker.cut()

    def _keep_watching(self) -> None:
        self._used_s = time.monotonic()
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    @property
    def _is_used(self) -> bool:
        return self._in_flight > 0 or time.monotonic() - self._used_s < IDLE_S

    async def _look(self) -> None:
        """At the workers' health, while anybody asks them. A refresh may wait for one that hangs."""
        while self._is_used:
            await asyncio.sleep(LOOK_S)
            rules = self.limits.rules
            for worker in self._heard_of():
                worker.seen = worker_health.looked(worker.seen, rules)
                if (worker.seen.quiet or 0) * LOOK_S >= self.limits.silent_cut_s:
                    worker.give_up(no_sign(self._host, self.limits.silent_cut_s))
            self._judge()

    def _heard_of(self) -> list[KnownWorker]:
        """Those whose silence means something: not one that stops, and was told so."""
        return [*self._known, *(worker for worker in self._left if worker.listens)]

    def _judge(self) -> None:
        """Requests go to those workers that are well; what waits for a silent one goes elsewhere."""
        rules = self.limits.rules
        standings = [worker_health.standing(worker.seen, rules) for worker in self._known]
        for worker, takes in zip(self._known, worker_health.takes(standings), strict=True):
            if takes is not worker.takes:
                log.warning("%s of %s takes %s: %s", worker.name, self._host, takes.name, worker.seen)
                self.router.set_takes(worker, takes)
        if any(worker.takes is not Takes.NONE for worker in self._known):
            for worker in self._heard_of():
                is_left = worker.slot < 0 or worker.takes is Takes.NONE
                if is_left and worker_health.is_silent(worker.seen, rules):
                    worker.move()
        self.turnstile.pump()

    async def _watch(self) -> None:
        while self._is_used:
            await self.refresh()
            if warming.is_ready():
                self.router.start_routing()
            self.router.tick(time.monotonic())
            self.turnstile.pump()
            await asyncio.sleep(REFRESH_S)

    def close(self) -> None:
        """End the background tasks, and the connections that nobody uses."""
        for worker in (*self._known, *self._left):
            worker.forget()
        for task in (self._watching, self._looking, self._refreshing, self._seeking, *self._asking):
            if task is not None:
                task.cancel()
