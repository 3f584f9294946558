"""The workers of one base in one gateway: requests enter here, and leave when they are answered.

`WorkerDirectory` knows the workers, and `HealthWatch` decides which of them may get requests.
`AdmissionQueue` chooses the next request, `BaseRouter` its worker, and `DemandMeter` counts the requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping

from controlplane import errors
from controlplane.gateway import warming
from controlplane.gateway.admission_queue import AdmissionQueue
from controlplane.gateway.demand_meter import DemandMeter
from controlplane.gateway.engine_limits import LOOK_S, EngineLimits
from controlplane.gateway.health_watch import HealthWatch
from controlplane.gateway.known_worker import KnownWorker
from controlplane.gateway.read_ahead import ReadAhead
from controlplane.gateway.worker_directory import Alive, Find, WorkerDirectory
from controlplane.traffic.base_router import BaseRouter, RoutingRules
from controlplane.traffic.member import RoutedRequest
from controlplane.traffic.member_set import StepModels
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.worker_health import Takes
from workers.messages import VariantRef, WorkerLoad

REFRESH_S = 2.0
# After this time without a request the workers of a base are not looked up until the next request.
IDLE_S = 60.0
# Longest wait for a worker: an engine that restarts needs a minute on a CPU.
WAIT_S = 120.0
RESTART_HINT_S = 5.0


class BaseWorkers:
    """`find` asks the workers of `base` for their reports. At most `max_queued` requests wait."""

    def __init__(
        self, base: str, find: Find, max_queued: int, alive: Alive, rules: RoutingRules, limits: EngineLimits
    ) -> None:
        self._base = base
        self.limits = limits
        self.demand = DemandMeter(time.monotonic, max_queued)
        self.router = BaseRouter(rules, time.monotonic(), warming.is_ready())
        self.queue = AdmissionQueue(base, self.router, max_queued, time.monotonic)
        self.directory = WorkerDirectory(base, find, alive, limits.rules, self)
        self.health = HealthWatch(base, limits, self.directory, self._set_takes)
        self._read_ahead = ReadAhead()
        self._used_s = 0.0
        self._taken_s = -math.inf
        self._refreshing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    # --- one request ---------------------------------------------------------------------------------------

    def begin(self, request: InferenceRequest) -> None:
        """Count a request until it ends, and look at the workers meanwhile."""
        self._keep_watching()
        self.demand.begin(request)

    async def enter(
        self, request: InferenceRequest, resent: bool, variant: VariantRef | None = None
    ) -> RoutedRequest:
        """Wait until the request is routed to a worker, and have its variant read meanwhile. `resent`: it was
        sent before, to a worker that was gone.

        Errors: those of `AdmissionQueue.enter`; Unavailable when no worker came within WAIT_S.
        """
        if not self.directory.known:
            self.directory.seek()
        if variant is None:
            return await self.queue.enter(request, resent)
        return await self.queue.enter(
            request, resent, lambda: self._read_ahead.announce(self.directory.known, variant)
        )

    def taken(self) -> None:
        """A worker took a request."""
        self._taken_s = time.monotonic()

    def released(self, routed: RoutedRequest, tokens: int | None) -> None:
        """A request left its worker; `tokens` as in `BaseRouter.ended`. Waiting requests may go."""
        self.router.ended(routed, tokens)
        if tokens is not None:
            self.demand.answered(time.monotonic() - routed.request.arrived_s)
        self.queue.pump()

    # --- what is learned of workers ------------------------------------------------------------------------

    def learn(self, models: StepModels) -> None:
        """Step times from now on."""
        self.router.learn(models)
        self.queue.pump()

    def workers_changed(self, were_known: bool) -> None:
        """As `Listener` of the directory."""
        self.router.set_members(self.directory.known)
        if self.directory.known and not were_known:
            self.queue.begin()
        elif self.directory.known:
            self.queue.pump()
        elif len(self.queue):
            self.directory.seek()

    def loaded(self, worker: KnownWorker, load: WorkerLoad) -> None:
        """As `Listener` of the directory."""
        self.router.loaded(worker, load, time.monotonic())
        self.queue.pump()

    def waits(self) -> bool:
        """As `Listener` of the directory: requests that waited for a worker for WAIT_S end."""
        before_s = time.monotonic() - WAIT_S
        if self._taken_s < before_s:
            self.queue.expire(before_s, self._no_worker)
        return len(self.queue) > 0

    def _no_worker(self) -> errors.Unavailable:
        return errors.Unavailable(
            f"the engine of '{self._base}' is not available (it starts or stops); try again",
            retry_after_s=RESTART_HINT_S,
        )

    def _set_takes(self, changed: Mapping[KnownWorker, Takes]) -> None:
        for worker, takes in changed.items():
            self.router.set_takes(worker, takes)
        self.queue.pump()

    # --- in the background ---------------------------------------------------------------------------------

    def _keep_watching(self) -> None:
        self._used_s = time.monotonic()
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._keep_refreshing())
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking())

    @property
    def _is_used(self) -> bool:
        return self.demand.in_flight > 0 or time.monotonic() - self._used_s < IDLE_S

    async def _keep_looking(self) -> None:
        """Look in a separate loop: a refresh may wait for a worker that hangs."""
        while self._is_used:
            await asyncio.sleep(LOOK_S)
            self.health.look()

    async def _keep_refreshing(self) -> None:
        while self._is_used:
            await self.directory.refresh()
            if warming.is_ready():
                self.router.start_routing()
            self.router.tick(time.monotonic())
            self.queue.pump()
            await asyncio.sleep(REFRESH_S)

    def close(self) -> None:
        """End the background tasks, and close idle connections."""
        for part in (self.directory, self.health, self._read_ahead):
            part.close()
        for task in (self._refreshing, self._looking):
            if task is not None:
                task.cancel()
