"""The processes of an engine: they end with their parent, and none is left after a failed start.

Signals that cannot be caught leave shared memory and semaphores behind. Python's resource tracker, which
lives until the processes that share it have ended, removes them. So a tracker is never killed here. Ray kills
the tracker of an actor that ends, so the tracker finishes first. It does not know the segments that vLLM's
collectives on CPUs create, and vLLM never removes those.
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
SESSION_WAIT_S = 15.0  # killed processes must release their GPUs first
POLL_S = 0.05
CPU_SEGMENT = "-cpushm_"


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, for any reason. Linux only.

    For processes that `multiprocessing` creates: vLLM's engine core and ranks. They notice a dead parent
    themselves only while they serve.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had already ended
        os.kill(os.getpid(), signal.SIGKILL)


def children() -> set[psutil.Process]:
    """All descendants of this process except resource trackers."""
    return {p for p in psutil.Process().children(recursive=True) if not _is_tracker(p)}


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill the processes, and wait until they and the resources that only they shared are gone."""
    targets = list(processes)
    for process in targets:
        unlink_segments(process.pid)
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(targets, timeout=END_WAIT_S)


def end_session(leader: int) -> None:
    """Kill the other processes of a session (`leader` is its pid), and wait until none lives.

    It waits at most SESSION_WAIT_S; processes that start meanwhile are killed, too. The parent of the leader
    must still wait for it.
    """
    deadline = time.monotonic() + SESSION_WAIT_S
    while (left := in_session(leader)) and time.monotonic() < deadline:
        for pid in left:
            unlink_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def in_session(leader: int) -> list[int]:
    """Pids of the session's live processes, latest start first; without this process and resource
    trackers.
    """
    members = []
    for other in psutil.process_iter(["status", "create_time"]):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            alive = other.info["status"] != psutil.STATUS_ZOMBIE and other.pid != os.getpid()
            if alive and os.getsid(other.pid) == leader and not _is_tracker(other):
                members.append((other.info["create_time"], other.pid))
    return [pid for _, pid in sorted(members, reverse=True)]


def end_with_stdin() -> None:
    """Make this process and all its children end when its standard input ends.

    The process that started it holds the other end, and need not be alive to end it.
    """

    def end_all() -> None:
        end(children())
        if os.getsid(0) == os.getpid():  # otherwise it is the session of a user's shell
            end_session(os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    when_stdin_ends(end_all)


def when_stdin_ends(act: Callable[[], None]) -> None:
    """Call `act`, in a thread, once the other end of the standard input is closed."""

    def wait() -> None:
        while os.read(0, 4096):  # sys.stdin would otherwise be locked when this process ends
            pass
        act()

    threading.Thread(target=wait, daemon=True).start()


def unlink_segments(pid: int | str = "self") -> None:
    """Unlink the segments of vLLM's CPU collectives that a process maps. A process that maps a segment keeps
    it.
    """
    with contextlib.suppress(OSError):
        for path in segments(Path(f"/proc/{pid}/maps").read_text()):
            path.unlink(missing_ok=True)


def segments(maps: str) -> set[Path]:
    """The segments made by vLLM's collectives on CPUs, from /proc/PID/maps."""
    names = {line.rpartition(" ")[2] for line in maps.splitlines()}
    return {Path(name) for name in names if name.startswith("/dev/shm/") and CPU_SEGMENT in name}


def finish_tracker() -> None:
    """Make this process's resource tracker remove the leftovers of its dead children, and wait for it.

    It does nothing while children live, since it would remove their resources. It starts again when it is
    needed.
    """
    # multiprocessing counts a child that psutil waited for as active forever.
    if any(psutil.pid_exists(child.pid) for child in multiprocessing.active_children() if child.pid):
        return
    tracker: Any = resource_tracker._resource_tracker  # there is no other way
    # it waits for all processes that have its pipe
    ending = threading.Thread(target=tracker._stop, daemon=True)
    ending.start()
    ending.join(END_WAIT_S)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False
