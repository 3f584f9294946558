"""One worker group's engine killed in the middle of a load, and how long until there is another."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from benchmarks.live.groups import Running
from controlplane.errors import OstinatoError


class Killing:
    """`with Killing(running, at_s):` kills the worker of the last group after `at_s`; None: nothing. Its
    process id comes from the API, and must be one of the cluster's."""

    def __init__(self, running: Running, at_s: float | None, every_s: float = 1.0) -> None:
        self._running, self._at_s, self._every_s = running, at_s, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.told: dict[str, float | int | None] | None = None

    def __enter__(self) -> Killing:
        self._start = time.monotonic()
        if self._at_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._at_s is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._stop.wait(self._at_s):
            return
        before: Sequence[int] = ()
        while not before:  # a busy engine may not answer at once
            before = self._pids()
            if not before and self._stop.wait(self._every_s):
                return
        victim = before[-1]
        if victim not in {process.pid for process in self._running.processes()}:
            raise RuntimeError(f"expected a process of the cluster, got {victim}")
        killed_s = time.monotonic() - self._start
        os.kill(victim, signal.SIGKILL)
        self.told = {"pid": victim, "killed_s": round(killed_s, 2), "replaced_after_s": None}
        while not self._stop.wait(self._every_s):
            now = self._pids()
            if victim not in now and len(now) >= len(before):
                self.told["replaced_after_s"] = round(time.monotonic() - self._start - killed_s, 1)
                return

    def _pids(self) -> tuple[int, ...]:
        with suppress(OstinatoError):
            return self._running.engine_pids()
        return ()
