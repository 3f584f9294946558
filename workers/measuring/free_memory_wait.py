"""The free memory of GPUs once those who had them before have given it back.

A driver frees a process's memory some time after the process is gone, and does not name every process from
inside a container; so what is free must also stand still.
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
    """Free bytes of each GPU when they stand still, or after `max_s`."""
    deadline = time.monotonic() + max_s
    seen = [look()]
    while not is_stable(seen) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        seen.append(look())
    return seen[-1].free


def is_stable(seen: Sequence[Sample]) -> bool:
    """Whether the last looks were alike: a few of GPUs without processes, more of others."""
    wanted = STABLE_SAMPLES_SHARED if seen[-1].processes else STABLE_SAMPLES
    return len(seen) >= wanted and len(set(seen[-wanted:])) == 1


def taken(before: int, now: int, gpu: int) -> int:
    """Bytes that came to be in use. Raises RuntimeError when more are free than before: then somebody else
    gave memory back meanwhile, and the difference says nothing."""
    if now > before:
        raise RuntimeError(
            f"GPU {gpu} of this engine has {(now - before) >> 20} MiB more free than before it started: "
            "another process gave memory back meanwhile; measure again when nobody else uses this GPU"
        )
    return before - now
