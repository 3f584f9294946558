"""The address on which a replica of Serve takes calls of other replicas.

Serve binds this gRPC port on all interfaces, and has no option for another address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

BIND = Target(
    "ray.serve._private.replica",
    "add_port_to_grpc_server",
    ("server", "address"),
    read={"2.60": "3090a1483798"},
)


def install(host: str) -> None:
    """Bind this replica's gRPC port to `host`. Serve binds it after the deployment's constructor."""

    def make(bind: Callable[[Any, str], int]) -> Callable[[Any, str], int]:
        def bind_to_host(server: Any, address: str) -> int:
            return bind(server, address.replace("[::]", host))

        return bind_to_host

    BIND.replace_once(make)
