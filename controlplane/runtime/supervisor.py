"""Restarts a local cluster when its head dies: `python -m controlplane.runtime.supervisor HOME LOCK`.

`ostinato up` starts the supervisor in the background, `ostinato up --foreground` becomes it (`hold`), and
`ostinato down` ends it first (supervisor_process.py). The supervisor does not belong to the cluster: it has
no mark, and outlives the cluster. It uses the code of `up` and `down`. Deployments come back from the state
store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from urllib.parse import urlsplit

import psutil

from controlplane import errors
from controlplane.runtime import local, supervision, supervisor_process
from controlplane.runtime.supervision import HEAD, Seen, Starts
from controlplane.settings import Settings

log = logging.getLogger(__name__)

LOOK_S = 1.0
CONNECT_S = 2.0


class Watch:
    """Observes one cluster: its head's processes, and whether its API's port accepts connections."""

    def __init__(self, processes: dict[str, psutil.Process], url: str) -> None:
        """`processes`: by their names of HEAD. A missing process counts as ended."""
        self._processes = processes
        where = urlsplit(url)
        self._address = (where.hostname or "", where.port or 80)
        self._heard_s = time.monotonic()

    def look(self) -> Seen:
        gone = tuple(each for each in HEAD if not _lives(self._processes.get(each)))
        now_s = time.monotonic()
        if _is_listened_on(self._address):
            self._heard_s = now_s
            return Seen(gone)
        return Seen(gone, now_s - self._heard_s)


def _lives(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_listened_on(address: tuple[str, int]) -> bool:
    """Tell whether a process listens there. After a timeout, assume a busy process."""
    try:
        with socket.create_connection(address, CONNECT_S):
            return True
    except TimeoutError:
        return True
    except OSError:
        return False


def supervise(
    watch: Callable[[], Watch],
    start_again: Callable[[], None],
    wanted: Callable[[], bool],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Watch the cluster, and restart it when needed, until it is no longer `wanted`.

    `start_again` raises its error, and is then called again after a pause. `watch` returns the observer of
    the newest cluster.
    """
    seeing, starts = watch(), Starts()
    while wanted():
        why = supervision.fault(seeing.look())
        if not why:
            pause(LOOK_S)
        elif (wait_s := supervision.wait_s(starts, time.monotonic())) > 0:
            pause(min(wait_s, LOOK_S))
        else:
            starts = _start_again(why, start_again, starts)
            seeing = watch()


def _start_again(why: str, start_again: Callable[[], None], starts: Starts) -> Starts:
    began_s = time.monotonic()
    log.warning("%s: the supervisor starts the cluster again", why)
    try:
        start_again()
        log.warning("the cluster answers again after %.1f s", time.monotonic() - began_s)
    except Exception as e:
        said = e.message if isinstance(e, errors.OstinatoError) else repr(e)
        log.error("the cluster could not be started: %s", said)
    return supervision.counted(starts, began_s, time.monotonic())


# --- the process ---------------------------------------------------------------------------------


def hold(settings: Settings) -> None:
    """Act as the supervisor until a signal (TERM, INT); then end the cluster, too.

    Errors: Unavailable when another process is the supervisor.
    """
    if (held := supervisor_process.hold(settings)) is None:
        raise errors.Unavailable(
            f"another supervisor watches {settings.home} already; `ostinato down` ends it and its cluster"
        )
    try:
        with _ended_by_signals():
            _run(settings)
    finally:
        local.end_leftovers(settings, log.info)
        os.close(held)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.suppress(_Ended):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended(BaseException):
    """A signal asked the process to end."""


def _run(settings: Settings) -> None:
    def watch() -> Watch:
        return Watch(local.head_processes(settings), settings.local_url)

    def wanted() -> bool:
        return supervisor_process.is_this_one(settings)

    supervise(watch, lambda: local.start_again(settings, log.info), wanted)


def main() -> None:
    settings = Settings()
    supervisor_process.started(int(sys.argv[2]))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    log.info("watching the cluster of %s", settings.home)
    _run(settings)


if __name__ == "__main__":
    main()
