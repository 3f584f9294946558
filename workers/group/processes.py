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
import time
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1
END_WAIT_S = 10.0
SESSION_WAIT_S = 15.0  # killed processes give their GPUs back first
POLL_S = 0.05
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
    """All descendants of this process except resource trackers."""
    return {p for p in psutil.Process().children(recursive=True) if not _is_tracker(p)}


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill them, and wait until they and what only they shared are gone."""
    targets = list(processes)
    for process in targets:
        unlink_segments(process.pid)
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(targets, timeout=END_WAIT_S)


def end_session(leader: int) -> None:
    """Kill the processes of a session (a leader's pid) but this one, and wait until none is left that lives,
    at most SESSION_WAIT_S: what starts meanwhile ends too. Who started the leader has yet to wait for it.
    """
    deadline = time.monotonic() + SESSION_WAIT_S
    while (left := in_session(leader)) and time.monotonic() < deadline:
        for pid in left:
            unlink_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def in_session(leader: int) -> list[int]:
    """Pids of the session's live processes, latest start first; not this one, nor resource trackers."""
    members = []
    for other in psutil.process_iter(["status", "create_time"]):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            alive = other.info["status"] != psutil.STATUS_ZOMBIE and other.pid != os.getpid()
            if alive and os.getsid(other.pid) == leader and not _is_tracker(other):
                members.append((other.info["create_time"], other.pid))
    return [pid for _, pid in sorted(members, reverse=True)]


def end_with_stdin() -> None:
    """Have this process and all it started end when its standard input does: whoever started it holds the
    other end, and need not live to end it."""

    def end_all() -> None:
        end(children())
        if os.getsid(0) == os.getpid():  # else it is the session of whoever called this by hand
            end_session(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    when_stdin_ends(end_all)


def when_stdin_ends(act: Callable[[], None]) -> None:
    """Call `act`, in a thread, once whoever holds the other end of the standard input is gone."""

    def wait() -> None:
        while os.read(0, 4096):  # sys.stdin would be locked when this process ends otherwise
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()


def unlink_segments(pid: int | str = "self") -> None:
    """Unlink the segments of vLLM's CPU collectives that a process maps. Who maps one keeps it."""
    with contextlib.suppress(OSError):
        for path in segments(Path(f"/proc/{pid}/maps").read_text()):
            path.unlink(missing_ok=True)


def segments(maps: str) -> set[Path]:
    """Of /proc/PID/maps: those made by vLLM's collectives on CPUs."""
    names = {line.rpartition(" ")[2] for line in maps.splitlines()}
    return {Path(name) for name in names if name.startswith("/dev/shm/") and CPU_SEGMENT in name}


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
