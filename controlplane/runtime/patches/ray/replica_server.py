"""The HTTP server that Serve starts for a replica.

Serve makes a uvicorn server for the replica's application, and has no option for the application's outer
layers, the address or the class of connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from profiler.patches.target import Target

START = Target(
    "ray.serve._private.replica",
    "start_asgi_http_server",
    ("app", "http_options"),
    read={"2.60": "1c2f2e011a4e"},
)
# Where Serve defines the function that its replica imports.
DEFINED = Target(
    "ray.serve._private.http_util",
    "start_asgi_http_server",
    ("app", "http_options"),
    read={"2.60": "5d271e036155"},
)


def install(make: Callable[[Any], Any]) -> None:
    """Let this replica's server be started by `make(start)`, where `start` is Serve's own function."""
    START.replace_once(make)
