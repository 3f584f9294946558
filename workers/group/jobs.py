"""Long jobs in their own processes: one at a time in a folder, ended with all their children, and their last
words.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from workers.group import processes

POLL_S = 0.2
LOCK_WAIT_S = 30.0
LOG_TAIL = 600  # characters of a process's own output in an error


class FolderBusy(RuntimeError):
    """Another job runs in the folder."""


@contextlib.contextmanager
def alone(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
    """Allow one job at a time in a folder: the job of a killed control plane may still be ending.

    Yields the lock's descriptor: a process that inherits it also holds the lock until it ends.
    Errors: FolderBusy after `wait_s`, OSError if no file can be written or locked.
    """
    with (folder / "lock").open("w") as lock:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as e:
                if time.monotonic() > deadline:
                    raise FolderBusy(str(folder)) from e
                time.sleep(POLL_S)
        yield lock.fileno()


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all its children: they have their own session."""
    processes.end_session(process.pid)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def exit_reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_words(log: Path) -> str:
    """The last line of a process's log that mentions an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["it printed nothing"])[-1][-LOG_TAIL:]
