"""A file that names one process, locked for as long as the process lives.

The lock shows whether the process lives: the kernel releases it however the process ends. The file holds the
process's number and start time, so that a later process with the same number is not mistaken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import psutil

_LENGTH = 128
END_S = 10.0  # between SIGTERM and SIGKILL


def take(path: Path) -> int | None:
    """A descriptor with the lock, which child processes may inherit; None: another process has the lock."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    return held


def name(held: int, pid: int) -> None:
    """Write the process that holds the lock into the file. Two writers of the same text do not disturb each
    other or a reader: each writes the whole file at once, at a fixed length.

    Errors: psutil.NoSuchProcess.
    """
    text = json.dumps({"pid": pid, "started": _started(pid)})
    os.pwrite(held, text.ljust(_LENGTH).encode(), 0)


def living(path: Path) -> psutil.Process | None:
    """The process that the file names, if it lives."""
    try:
        found = json.loads(path.read_text())
        process = psutil.Process(int(found["pid"]))
        same = _started(process.pid) == found["started"]
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return None


def end(path: Path) -> bool:
    """End the process that the file names, first with SIGTERM; False if there was none. Never the caller
    itself."""
    process = living(path)
    if process is None or process.pid == os.getpid():
        return False
    try:
        process.terminate()
        try:
            process.wait(END_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(END_S)
    except psutil.NoSuchProcess:
        pass
    return True


def _started(pid: int) -> str:
    """The start time of a process in the kernel's ticks since boot where available: clock changes do not
    affect it.

    Errors: psutil.NoSuchProcess.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return str(psutil.Process(pid).create_time())
    return stat.rpartition(")")[2].split()[19]  # its name may hold spaces and brackets
