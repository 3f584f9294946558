"""Work beside the running batches, in a few threads of lower priority than the engine's own."""

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
# To Linux' scheduler: a thread of the engine weighs three of these. Much lower, and on a busy machine a
# thread that holds Python's lock could make the engine wait for it.
NICENESS = 5

# It may give others that are to be done after it, and before what else its caller asks for.
Job: TypeAlias = "Callable[[], Sequence[Job] | None]"


def run_here(jobs: Sequence[Job]) -> None:
    """Do them all, and what they give, in this thread."""
    waiting = deque(jobs)
    while waiting:
        waiting.extendleft(reversed(waiting.popleft()() or ()))


def threads_for(ranks: int) -> int:
    """Of one rank of `ranks` on this machine: together they take at most half of its cores."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))


class _Caller:
    """Who waits until its jobs are done. `undone` of them are not, of which `jobs` were not begun."""

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.undone = 0
        self.error: BaseException | None = None
        self.done = threading.Event()


class LoaderThreads:
    """Runs jobs of several callers, one of each in turn: a large load does not hold up a small one."""

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._callers: deque[_Caller] = deque()  # those with jobs that were not begun
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "variant-loader-threads", initializer=_modest)
        self._start(threads)

    def run(self, jobs: Sequence[Job]) -> None:
        """Do them all, and what they give, in any order. Raises what the first to fail raised, once none
        runs any more."""
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
        """Have all threads now, each without helpers of torch's: `threads` is what all of this may take."""
        before, all_there = torch.get_num_threads(), threading.Barrier(threads)
        wait([self._threads.submit(all_there.wait) for _ in range(threads)])
        # torch also lets every thread to come have what the last one asked for: take that back, for others.
        other = threading.Thread(target=torch.set_num_threads, args=(before,))
        other.start()
        other.join()


def _modest() -> None:
    """Of the calling thread."""
    torch.get_num_threads()  # the first call in a thread sets what all threads have
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):  # a wish, and Linux' alone
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
