"""Waits until the free memory of GPUs is stable: until former processes have given theirs back.

A driver frees a process's memory some time after the process is gone. Inside a container it does not name
every process, so it is not enough that none is named: free memory must stop changing, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

POLL_S = 0.1
MAX_S = 10.0
STABLE_SAMPLES, STABLE_SAMPLES_SHARED = 3, 20  # a process that is there may be one that is ending


@dataclass(frozen=True)
class Sample:
    """Free bytes of each GPU, and how many processes the driver names on them."""

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
    """Whether the last readings agree: a few readings of GPUs without processes, more of others."""
    wanted = STABLE_SAMPLES_SHARED if seen[-1].processes else STABLE_SAMPLES
    return len(seen) >= wanted and len(set(seen[-wanted:])) == 1


def taken(before: int, now: int, gpu: int) -> int:
    """Bytes taken between the two readings. Raises RuntimeError when more are free than before: another
    process gave memory back meanwhile, so the difference means nothing."""
    if now > before:
        raise RuntimeError(
            f"GPU {gpu} of this engine has {(now - before) >> 20} MiB more free than before it started: "
            "another process gave memory back meanwhile; measure again when nobody else uses this GPU"
        )
    return before - now
