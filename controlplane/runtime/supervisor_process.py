"""The supervisor's process (supervisor.py): one for each home, in the background."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from controlplane import errors
from controlplane.runtime import pidfile
from controlplane.settings import Settings

MODULE = "controlplane.runtime.supervisor"
LOG = "supervisor.log"


def start(settings: Settings, environment: Mapping[str, str]) -> None:
    """Start the supervisor in the background, unless one runs. It outlives the caller and its terminal."""
    if (held := pidfile.take(_file(settings))) is None:
        return
    try:
        pidfile.name(held, _spawn(settings, held, environment))
    except psutil.NoSuchProcess as e:
        raise errors.Unavailable(
            f"the supervisor ended at once (see {settings.home / LOG}); the cluster runs without a supervisor"
        ) from e
    finally:
        os.close(held)  # the new process has it, too


def hold(settings: Settings) -> int | None:
    """Make this process the supervisor: the lock's descriptor, or None if another process is the
    supervisor."""
    if (held := pidfile.take(_file(settings))) is not None:
        pidfile.name(held, os.getpid())
    return held


def started(held: int) -> None:
    """Record the new process, which calls this: the process that spawned it may not have recorded it yet.
    Keep the lock from child processes."""
    os.set_inheritable(held, False)
    pidfile.name(held, os.getpid())


def is_this_one(settings: Settings) -> bool:
    """Tell whether this process is the supervisor. False also when the home no longer exists."""
    found = pidfile.living(_file(settings))
    return found is not None and found.pid == os.getpid()


def end(settings: Settings) -> bool:
    """End the supervisor, if one runs and is not the caller; its cluster stays. Errors: Unavailable if it
    does not end."""
    ended = pidfile.end(_file(settings))
    left = pidfile.living(_file(settings))
    if left is not None and left.pid != os.getpid():
        raise errors.Unavailable(
            f"the supervisor (process {left.pid}) does not end; end it with `kill -9 {left.pid}`"
        )
    return ended


def _spawn(settings: Settings, held: int, environment: Mapping[str, str]) -> int:
    """Start the process, and return its id. It has its own session, no terminal, and the lock."""
    command = [sys.executable, "-m", MODULE, str(settings.home), str(held)]
    with (settings.home / LOG).open("a") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(held,),
            start_new_session=True,
        ).pid


def _file(settings: Settings) -> Path:
    return settings.home / "supervisor.json"
