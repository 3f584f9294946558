"""Ray Serve's settings for the front door: variables that its processes read when they start.

`deploy/ray.env`, the images and the chart set the same values (`tests/deploy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from controlplane.runtime.front_door.sign_of_life import OFFSET

PROGRAM = "ostinato-haproxy"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
# Ports of gateways on one machine. Each home has its own range. Otherwise HAProxy could find another
# installation's gateway at the port of a gateway that ended.
FIRST_PORT, PORTS_OF_A_HOME, WINDOWS = 20_000, 2 * OFFSET, 110

EVERYWHERE: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A gateway's server and its application share one loop (`controlplane.runtime.replica_http`).
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    CALLBACK: "controlplane.runtime.front_door.fallback:prepare",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "controlplane.runtime.front_door.manager:prepare",
    # Fewer ports than the distance between a gateway's port and the port of its sign of life.
    "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": "30000",
    "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(30_000 + OFFSET - 1),
    # Serve notices a dead proxy after three checks, by default ten seconds apart.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Serve replaces a proxy that is not ready after three checks. On a busy machine a start takes longer than
    # three times Serve's default of 5 s. supervision.API_GONE_S is longer than this.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
}


def of_one_machine(folder: Path, mark: str) -> dict[str, str]:
    """The variables for a cluster of `ostinato up`. HAProxy's files and sockets lie in `folder`, which
    only the owner can read."""
    first = FIRST_PORT + int(mark, 16) % WINDOWS * PORTS_OF_A_HOME
    return {
        **EVERYWHERE,
        BINARY: str(folder / PROGRAM),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first + 1),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + OFFSET - 1),
    }


def problem(environment: Mapping[str, str]) -> str:
    """The reason why a gateway must not start in this environment: requests would bypass our limits.
    Empty: the gateway may start."""
    wrong = [
        name for name in ("RAY_SERVE_ENABLE_HA_PROXY", CALLBACK) if environment.get(name) != EVERYWHERE[name]
    ]
    if Path(environment.get(BINARY, "")).name != PROGRAM:
        wrong.append(BINARY)
    if not wrong:
        return ""
    got = ", ".join(f"{name}={environment.get(name, '')!r}" for name in wrong)
    return (
        f"expected Ray's processes to have the variables of deploy/ray.env, got {got}; set these variables"
        " on every node, and start Ray again"
    )


def write_program(folder: Path, python: str) -> None:
    """Write `ostinato-haproxy` into `folder`: a source tree, for instance, has no installed program."""
    program = folder / PROGRAM
    program.write_text(f'#!/bin/sh\nexec "{python}" -m controlplane.runtime.front_door.haproxy "$@"\n')
    program.chmod(0o700)
