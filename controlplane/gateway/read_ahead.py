"""Which worker reads a variant whose requests wait for their turn, and how often it is told so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from controlplane.traffic.worker_health import Takes

if TYPE_CHECKING:
    from controlplane.gateway.worker_pool import KnownWorker

# As long as nobody has it: a worker reads one ahead at a time, and may have had others to read.
AGAIN_S = 2.0
MOST = 4096  # uids that are remembered


class Wanted:
    """When workers were told of each variant."""

    def __init__(self) -> None:
        self._told_s: dict[int, float] = {}

    def is_new(self, uid: int, now_s: float) -> bool:
        """Whether it is to be told now: not again within AGAIN_S."""
        told_s = self._told_s.get(uid)
        if told_s is not None and now_s - told_s < AGAIN_S:
            return False
        if len(self._told_s) >= MOST:
            self._told_s = {u: at_s for u, at_s in self._told_s.items() if now_s - at_s < AGAIN_S}
        self._told_s[uid] = now_s
        return True


def reader(workers: Sequence[KnownWorker], uid: int) -> KnownWorker | None:
    """The least busy of those that take requests; None where one of them has the variant in memory."""
    taking = [worker for worker in workers if worker.takes is Takes.ALL]
    if any(
        worker.load is not None and any(uid == held for held, _ in worker.load.variants) for worker in taking
    ):
        return None
    return min(taking, key=lambda worker: worker.outstanding, default=None)
