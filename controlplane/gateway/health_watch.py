"""Which workers of a base may get requests, by their answers, their silence, and probes.

`controlplane.traffic.worker_health` decides; this module feeds it and carries its decisions out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from controlplane.gateway import probes
from controlplane.gateway.engine_limits import LOOK_S, EngineLimits, no_sign
from controlplane.gateway.known_worker import KnownWorker
from controlplane.gateway.probes import Verdict
from controlplane.gateway.worker_directory import WorkerDirectory
from controlplane.repeated_lines import REPEATED, Rarely
from controlplane.traffic import worker_health
from controlplane.traffic.worker_health import Takes
from workers import request_headers

log = logging.getLogger(__name__)
log.addFilter(Rarely())


class HealthWatch:
    """`set_takes` is called with the workers whose permission to get requests has changed."""

    def __init__(
        self,
        base: str,
        limits: EngineLimits,
        directory: WorkerDirectory,
        set_takes: Callable[[Mapping[KnownWorker, Takes]], None],
    ) -> None:
        self._base = base
        self._limits = limits
        self._directory = directory
        self._set_takes = set_takes
        self._probing: set[asyncio.Task[None]] = set()

    def answered(self, worker: KnownWorker, status: int, fault: bytes = b"", variant: int = 0) -> None:
        """A worker's answer to a request of a variant (0: of the base) began, with this status and fault."""
        if fault == request_headers.OF_LOADING:
            self._could_not_load(worker, variant)
        elif status >= 500 or fault:
            worker.seen = worker_health.erred(worker.seen)
            self._probe_if_doubtful(worker)
        else:
            self._did_well(worker, variant)

    def failed(self, worker: KnownWorker) -> None:
        """A worker's request broke off, or had no answer in time."""
        worker.seen = worker_health.failed(worker.seen, self._limits.rules)
        self._judge()

    def look(self) -> None:
        """To be called every LOOK_S while the base gets requests."""
        rules = self._limits.rules
        for worker in self._directory.watched():
            worker.seen = worker_health.looked(worker.seen, rules)
            if (worker.seen.quiet or 0) * LOOK_S >= self._limits.silent_cut_s:
                worker.give_up(no_sign(self._base, self._limits.silent_cut_s))
        self._judge()

    def close(self) -> None:
        for task in self._probing:
            task.cancel()

    def _could_not_load(self, worker: KnownWorker, variant: int) -> None:
        """If one variant fails to load, its disk may be the cause; if several do, the worker or its node."""
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

    def _probe_if_doubtful(self, worker: KnownWorker) -> None:
        is_known = worker in self._directory.known
        if worker.is_probed or not is_known or not worker_health.is_doubtful(worker.seen, self._limits.rules):
            return
        worker.is_probed = True
        task = asyncio.create_task(self._probe(worker))
        self._probing.add(task)
        task.add_done_callback(self._probing.discard)

    async def _probe(self, worker: KnownWorker) -> None:
        """Find out whether the engine fails, or only the requests that it got."""
        good, in_a_row = worker.good, worker.seen.errors
        try:
            found = await probes.verdict(worker, self._base, self._limits.first_byte_s)
        finally:
            worker.is_probed = False
        log.warning(
            "%s of %s answered %d requests in a row with an engine error; a probe found the engine %s",
            *(worker.name, self._base, in_a_row, found.name),
            extra=REPEATED,
        )
        if found is Verdict.GONE:
            self._directory.drop(worker)
        elif found is Verdict.WELL or worker.good == good:  # else real answers came, which count more
            worker.seen = worker_health.asked(worker.seen, self._limits.rules, found is Verdict.WELL)
            self._judge()

    def _judge(self) -> None:
        """Send requests to healthy workers only; move requests that wait at a silent worker."""
        known, rules = self._directory.known, self._limits.rules
        standings = [worker_health.standing(worker.seen, rules) for worker in known]
        judged = zip(known, worker_health.takes(standings), strict=True)
        changed = {worker: takes for worker, takes in judged if takes is not worker.takes}
        for worker, takes in changed.items():
            log.warning("%s of %s takes %s: %s", worker.name, self._base, takes.name, worker.seen)
        if changed:
            self._set_takes(changed)
        if any(worker.takes is not Takes.NONE for worker in known):
            self._move_from_silent()

    def _move_from_silent(self) -> None:
        for worker in self._directory.watched():
            is_left = worker.slot < 0 or worker.takes is Takes.NONE
            if is_left and worker_health.is_silent(worker.seen, self._limits.rules):
                worker.move()
