"""Which worker reads a variant whose request waits for its turn, and how often it is told so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from controlplane.traffic.worker_health import Takes

if TYPE_CHECKING:
    from controlplane.gateway.worker_pool import KnownWorker

# Of several requests for a variant that come within so long, the first has it told.
AGAIN_S = 2.0
MOST = 4096  # uids that are remembered


class Wanted:
    """When workers were told of each variant."""

    def __init__(self) -> None:
        self._told_s: OrderedDict[int, float] = OrderedDict()  # the oldest first

    def is_new(self, uid: int, now_s: float) -> bool:
        """Whether nobody was told within AGAIN_S."""
        told_s = self._told_s.get(uid)
        return told_s is None or now_s - told_s >= AGAIN_S

    def told(self, uid: int, now_s: float) -> None:
        self._told_s[uid] = now_s
        self._told_s.move_to_end(uid)
        if len(self._told_s) > MOST:
            self._told_s.popitem(last=False)


def reader(workers: Sequence[KnownWorker], uid: int) -> KnownWorker | None:
    """The least busy of those that take requests, and of equals the one that was told longest ago; None where
    one of them has the variant in memory."""
    taking = [worker for worker in workers if worker.takes is Takes.ALL]
    if any(uid in worker.held for worker in taking):
        return None
    return min(taking, key=lambda worker: (worker.outstanding, worker.told_s), default=None)
