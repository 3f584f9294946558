"""The processes of an engine: that they end with their parent, and that none is left after a failed start.

Signals that cannot be caught leave shared memory and semaphores behind: Python's resource tracker, which
lives until the processes that share it are gone, takes them away. So a tracker is never killed here; Ray
kills that of an actor that ends, so it is let finish before. It does not know the segments that vLLM's
collectives on CPUs make, and vLLM never removes those.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
END_WAIT_S = 10.0
CPU_SEGMENT = "-cpushm_"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone, however that ended. Linux only.

    For processes that `multiprocessing` made: vLLM's engine core and ranks. They notice a dead parent by
    themselves only while they serve.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it was gone before
        os.kill(os.getpid(), signal.SIGKILL)


def children() -> set[psutil.Process]:
    """All descendants of this process, resource trackers left out."""
    return {p for p in psutil.Process().children(recursive=True) if not _is_tracker(p)}


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill them, and wait until they and what only they shared are gone."""
    found = list(processes)
    for process in found:
        unlink_segments(process.pid)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=END_WAIT_S)


def unlink_segments(pid: int | str = "self") -> None:
    """Unlink the segments of vLLM's CPU collectives that a process maps. Who maps one keeps it."""
    with contextlib.suppress(OSError):
        for path in segments(Path(f"/proc/{pid}/maps").read_text()):
            path.unlink(missing_ok=True)


def segments(maps: str) -> set[Path]:
    """Of /proc/PID/maps: those made by vLLM's collectives on CPUs."""
    found = {line.rpartition(" ")[2] for line in maps.splitlines()}
    return {Path(name) for name in found if name.startswith("/dev/shm/") and CPU_SEGMENT in name}


def finish_tracker() -> None:
    """Have this process's resource tracker take away what its dead children left, and wait for it.

    Not while children live: it would take away what they use. It starts anew when it is needed.
    """
    # A child that psutil waited for is active for ever to multiprocessing.
    if any(psutil.pid_exists(child.pid) for child in multiprocessing.active_children() if child.pid):
        return
    tracker: Any = resource_tracker._resource_tracker  # there is no other way
    ending = threading.Thread(target=tracker._stop, daemon=True)  # it waits for all who have its pipe
    ending.start()
    ending.join(END_WAIT_S)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False
