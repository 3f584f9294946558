"""A file that names one process, held by a lock for as long as it lives.

The lock says whether there is one: the kernel takes it away when the process ends, however it ends. The name
is its number and when it started, so that a number that was given to another process since is not taken for
it.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import psutil

_LENGTH = 128
END_S = 10.0  # from being asked to end to being killed


def take(path: Path) -> int | None:
    """A descriptor with the lock, which whoever inherits it has too; None: another process has it."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    return held


def name(held: int, pid: int) -> None:
    """Write into a file that was taken whose it is. Two who write the same do not disturb each other, nor
    whoever reads: the whole file is written at once, and is never shorter.

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
    """End the process that the file names, first kindly; False if there was none. Never the caller itself."""
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
    """In the kernel's ticks since the machine was started, where it says so: no setting of a clock changes
    them.

    Errors: psutil.NoSuchProcess.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return str(psutil.Process(pid).create_time())
    return stat.rpartition(")")[2].split()[19]  # its name may hold spaces and brackets
