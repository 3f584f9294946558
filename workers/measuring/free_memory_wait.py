"""Waits until the free memory of GPUs is stable: until earlier processes have released theirs.

A driver frees a process's memory some time after the process has ended. Inside a container the driver does
not list every process. So an empty list is not enough: free memory must stop changing, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

POLL_S = 0.1
MAX_S = 10.0
STABLE_SAMPLES, STABLE_SAMPLES_SHARED = 3, 20  # a listed process may be one that is ending


@dataclass(frozen=True)
class Sample:
    """Free bytes of each GPU, and the number of processes that the driver lists on them."""

    free: tuple[int, ...]
    processes: int


def stable_free_bytes(look: Callable[[], Sample], max_s: float = MAX_S) -> tuple[int, ...]:
    """Free bytes of each GPU once they are stable, or after `max_s`."""
    deadline = time.monotonic() + max_s
    seen = [look()]
    while not is_stable(seen) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        seen.append(look())
    return seen[-1].free


def is_stable(seen: Sequence[Sample]) -> bool:
    """Whether the last readings agree: a few readings for GPUs without processes, more for others."""
    wanted = STABLE_SAMPLES_SHARED if seen[-1].processes else STABLE_SAMPLES
    return len(seen) >= wanted and len(set(seen[-wanted:])) == 1


def taken(before: int, now: int, gpu: int) -> int:
    """Bytes taken between the two readings.

    Raises RuntimeError if more are free than before: another process released memory meanwhile, so the
    difference means nothing.
    """
    if now > before:
        raise RuntimeError(
            f"GPU {gpu} has {(now - before) >> 20} MiB more free memory than before this engine started, "
            "because another process freed memory; measure again when no other process uses this GPU"
        )
    return before - now
