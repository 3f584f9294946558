"""A child process that reads a tenant's files and answers with lines. It sets its own limits."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MAX_ANSWER_BYTES = 16 << 20
READ_BYTES = 1 << 16
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "PYTHONDONTWRITEBYTECODE")


class ReaderDied(Exception):
    """The process was killed or ended before it had answered. The message gives the cause."""

    def __init__(self, message: str, *, out_of_time: bool = False) -> None:
        super().__init__(message)
        self.out_of_time = out_of_time  # the limit of CPU time was reached


class ChildProcess:
    """Runs a module in a process that always ends with this one: its input is closed then."""

    def __init__(self, module: str, quiet: bool = False) -> None:
        self._kept = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, wait for its end, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # unwritten data cannot be written any longer
                continue

    def send(self, line: bytes) -> None:
        """Send a line. Raises ReaderDied; then call `kill`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError as e:
            raise self._death() from e

    def line(self, ends_s: float) -> bytes:
        """The next line of the answer, waiting until `ends_s`. Raises ReaderDied; then call `kill`."""
        assert self._process.stdout is not None
        out = self._process.stdout.fileno()
        while b"\n" not in self._kept:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not _is_readable(out, left_s):
                raise ReaderDied("its process took longer than allowed and was killed")
            part = os.read(out, READ_BYTES)
            if not part:
                raise self._death()
            self._kept += part
            if len(self._kept) > MAX_ANSWER_BYTES:
                raise ReaderDied(f"its process answered with over {MAX_ANSWER_BYTES} bytes and was killed")
        line, _, self._kept = self._kept.partition(b"\n")
        return line

    def _death(self) -> ReaderDied:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return ReaderDied("its process used more CPU time than allowed and was killed", out_of_time=True)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return ReaderDied(f"its process {how}")


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    """Whether data arrives within this time. (`select.select` takes no number above 1023.)"""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * timeout_s))


def _environment() -> dict[str, str]:
    """The path of our code, and no secrets; one thread is enough."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    ours = str(Path(__file__).parents[2])
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return kept | threads | {"PYTHONPATH": ours, "RUST_BACKTRACE": "0"}
