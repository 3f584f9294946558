"""The worker for a request while the compiled policies are not ready, or choose none. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def least_outstanding(outstanding: Sequence[int], tie: float) -> int:
    """Index of the worker with the fewest requests of ours; `tie` (in [0, 1)) chooses among equals.

    Raises ValueError when there is no worker.
    """
    least = min(outstanding)
    equals = [i for i, count in enumerate(outstanding) if count == least]
    return equals[int(tie * len(equals))]
