"""Work beside the running batches, in a few threads of lower priority than the engine's own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch

MAX_THREADS = 8
# To Linux' scheduler: a thread of the engine weighs three of these. Much lower, and on a busy machine a
# thread that holds Python's lock could make the engine wait for it.
NICENESS = 5

Job = Callable[[], None]


def threads_for(ranks: int) -> int:
    """Of one rank of `ranks` on this machine: together they take at most half of its cores."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * ranks)))


class LoaderThreads:
    """Runs jobs of several callers, one of each in turn: a large load does not hold up a small one."""

    def __init__(self, threads: int) -> None:
        self.count = threads
        self._callers: deque[deque[tuple[Job, Future[None]]]] = deque()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "variant-loader-threads", initializer=_modest)
        self._start(threads)

    def run(self, jobs: Sequence[Job]) -> None:
        """Do them all, in any order. Raises what the first to fail raised, once none runs any more."""
        if not jobs:
            return
        futures: list[Future[None]] = [Future() for _ in jobs]
        with self._lock:
            self._callers.append(deque(zip(jobs, futures, strict=True)))
        for _ in jobs:
            self._threads.submit(self._next)
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()  # has no effect on those that ended or run
        wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    def _next(self) -> None:
        with self._lock:
            jobs = self._callers.popleft()
            job, future = jobs.popleft()
            if jobs:
                self._callers.append(jobs)
        if not future.set_running_or_notify_cancel():
            return
        try:
            job()
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(None)

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
