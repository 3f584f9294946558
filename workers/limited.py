"""Limits on an untrusted tokenizer or chat template that runs in one of our processes."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from profiler.errors import CheckpointError

CPU_S = 600.0  # a file of 256 MiB, the largest allowed, takes a minute or two
MEMORY_BYTES = 8 << 30


class _TooLong(BaseException):
    """Not an Exception, so that no library turns it into another error."""


@contextmanager
def limited(what: str, cpu_s: float | None = None, memory_bytes: int | None = None) -> Iterator[None]:
    """Within this block the process may use at most `cpu_s` of CPU time and `memory_bytes` of additional
    memory.

    `what` appears in the errors. Only the main thread gets the signal for too long a run. Errors:
    CheckpointError.
    """
    cpu_s, memory_bytes = cpu_s or CPU_S, memory_bytes or MEMORY_BYTES
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGPROF, _end) if in_main else None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = data_bytes() + memory_bytes
    bounds = [allowed, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        if in_main:
            # repeated, since a handler may swallow the first
            signal.setitimer(signal.ITIMER_PROF, cpu_s, 1.0)
        yield
    except _TooLong:
        raise CheckpointError(
            f"{what} took more than {cpu_s:g} s of CPU time and was stopped; check that file"
        ) from None
    except MemoryError:
        raise CheckpointError(
            f"{what} took more than {memory_bytes >> 20} MiB of memory and was stopped; check that file"
        ) from None
    finally:
        if in_main:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _end(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def data_bytes() -> int:
    """The memory that counts towards RLIMIT_DATA: private writable memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0
