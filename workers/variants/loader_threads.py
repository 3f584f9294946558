"""Work during running batches, in a few threads of lower priority than the engine's own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias

import torch

MAX_THREADS = 8
# For Linux' scheduler: one thread of the engine weighs as much as three of these. With much lower priority, a
# thread that holds the GIL on a busy machine could make the engine wait.
NICENESS = 5

# A job may return more jobs, which run after it, and before the other jobs of its caller.
Job: TypeAlias = "Callable[[], Sequence[Job] | None]"


def run_here(jobs: Sequence[Job]) -> None:
    """Do all jobs, and the jobs that they return, in this thread."""
    waiting = deque(jobs)
    while waiting:
        waiting.extendleft(reversed(waiting.popleft()() or ()))


def threads_for(ranks: int) -> int:
    """The threads of one of `ranks` ranks on this machine: together they take at most half of its cores."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))


class _Caller:
    """A caller that waits for its jobs. `undone`: jobs that have not ended; `jobs`: those that have not
    begun.
    """

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.undone = 0
        self.error: BaseException | None = None
        self.done = threading.Event()


class LoaderThreads:
    """Runs jobs of several callers, one of each in turn, so that a large load does not delay a small one."""

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._callers: deque[_Caller] = deque()  # those with jobs that have not begun
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "variant-loader-threads", initializer=_modest)
        self._start(threads)

    def run(self, jobs: Sequence[Job]) -> None:
        """Do all jobs, and the jobs that they return, in any order.

        Raises the first job's error, once no job runs any longer.
        """
        if not jobs:
            return
        caller = _Caller()
        self._add(caller, jobs)
        caller.done.wait()
        if caller.error is not None:
            raise caller.error

    def _add(self, caller: _Caller, jobs: Sequence[Job]) -> None:
        with self._lock:
            for _ in jobs:
                self._threads.submit(self._next)  # raises when Python ends
            if jobs and not caller.jobs:
                self._callers.append(caller)
            caller.jobs.extendleft(reversed(jobs))
            caller.undone += len(jobs)

    def _next(self) -> None:
        with self._lock:
            caller = self._callers.popleft()
            job = caller.jobs.popleft()
            if caller.jobs:
                self._callers.append(caller)
        try:
            if caller.error is None:
                self._add(caller, job() or ())
        except BaseException as e:
            caller.error = caller.error or e
        with self._lock:
            caller.undone -= 1
            if not caller.undone:
                caller.done.set()

    def _start(self, threads: int) -> None:
        """Start all threads now, each without torch's own helper threads: `threads` is the limit for all."""
        before, all_there = torch.get_num_threads(), threading.Barrier(threads)
        wait([self._threads.submit(all_there.wait) for _ in range(threads)])
        # torch also gives this setting to every later thread, so restore it for the others.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


def _modest() -> None:
    """Lower the priority of the calling thread."""
    torch.get_num_threads()  # the first call in a thread sets the value for all threads
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # best effort, and only on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
