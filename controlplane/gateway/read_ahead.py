"""Have a worker read a variant from disk while the variant's request waits in the queue."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence

from controlplane.gateway import probes
from controlplane.gateway.known_worker import KnownWorker
from controlplane.traffic.worker_health import Takes
from workers.messages import VariantRef

# Within this time, only the first of several requests for one variant is announced.
AGAIN_S = 2.0
MAX_REMEMBERED = 4096  # uids


class Announced:
    """When each variant was last announced to a worker."""

    def __init__(self) -> None:
        self._announced_s: OrderedDict[int, float] = OrderedDict()  # the oldest first

    def is_due(self, uid: int, now_s: float) -> bool:
        """Whether the variant was not announced within AGAIN_S."""
        announced_s = self._announced_s.get(uid)
        return announced_s is None or now_s - announced_s >= AGAIN_S

    def note(self, uid: int, now_s: float) -> None:
        self._announced_s[uid] = now_s
        self._announced_s.move_to_end(uid)
        if len(self._announced_s) > MAX_REMEMBERED:
            self._announced_s.popitem(last=False)


class ReadAhead:
    """Announces the variants of waiting requests to workers."""

    def __init__(self) -> None:
        self._announced = Announced()
        self._announcing: set[asyncio.Task[None]] = set()

    def announce(self, workers: Sequence[KnownWorker], variant: VariantRef) -> None:
        """Have one worker read the variant, unless a worker has it in memory. The worker's load shows when it
        has it."""
        now_s = time.monotonic()
        if not self._announced.is_due(variant.uid, now_s):
            return
        worker = reader(workers, variant.uid)
        if worker is None:
            return
        self._announced.note(variant.uid, now_s)
        worker.announced_s = now_s
        task = asyncio.create_task(probes.announce(worker, variant))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    def close(self) -> None:
        for task in self._announcing:
            task.cancel()


def reader(workers: Sequence[KnownWorker], uid: int) -> KnownWorker | None:
    """The least busy worker that takes requests; among equals the worker whose last announcement was longest
    ago. None if a worker has the variant in memory."""
    taking = [worker for worker in workers if worker.takes is Takes.ALL]
    if any(uid in worker.held for worker in taking):
        return None
    return min(taking, key=lambda worker: (worker.outstanding, worker.announced_s), default=None)
