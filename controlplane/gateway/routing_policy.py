"""The routing policy: which worker of a base gets a request, and whether one more may wait.

Pure functions of what a gateway knows of the workers (`worker_pool` asks them for every request).
"""

from __future__ import annotations

from collections.abc import Sequence


def least_outstanding(outstanding: Sequence[int], tie: float) -> int:
    """Index of the worker with the fewest requests of ours; `tie` (in [0, 1)) chooses among equals.

    Raises ValueError when there is no worker.
    """
    least = min(outstanding)
    equals = [i for i, count in enumerate(outstanding) if count == least]
    return equals[int(tie * len(equals))]


def has_room(in_flight: int, ongoing_limits: Sequence[int], max_queued: int) -> bool:
    """Whether a host with these workers takes one request more from this gateway."""
    return in_flight < sum(ongoing_limits) + max_queued
