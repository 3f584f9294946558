"""A gateway that says nothing any more loses its requests: Serve's proxy pings it.

What hangs, and what is behind a broken network, breaks no connection: without pings a request there would
have neither an answer nor an error. These are gRPC's own (HTTP/2's), on the connection that requests take. A
gateway that leaves one unanswered for so long is taken for gone: requests that the proxy does not know to
have been taken go to another, others end with `unavailable`, and none is sent to it until it answers again
(`controlplane.runtime.gateway_router`). gRPC answers them beside Python, so a gateway that is only busy does,
too. They need requests to go over gRPC (`RAY_SERVE_PROXY_USE_GRPC`).
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)

Options = tuple[tuple[str, int], ...]

EVERY_S = 0.5
# How long a connection may take to be made, and to be tried again.
CONNECT_S, AGAIN_S = 3.0, 1.0


def of_channel(silent_s: float, every_s: float = EVERY_S) -> Options:
    """Options of a channel to a gateway."""
    return (
        ("grpc.keepalive_time_ms", _ms(every_s)),
        ("grpc.keepalive_timeout_ms", _ms(silent_s)),
        ("grpc.http2.ping_timeout_ms", _ms(silent_s)),  # gRPC 1.85 looks at this, and waits a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _ms(AGAIN_S)),
        ("grpc.max_reconnect_backoff_ms", _ms(AGAIN_S)),
        ("grpc.min_reconnect_backoff_ms", _ms(CONNECT_S)),
    )


# gRPC's servers close connections with so many pings.
OF_SERVER: Options = (
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    ("grpc.http2.max_ping_strikes", 0),
)


def bear_pings() -> None:
    """Have a replica of this process answer pings however many come. Serve makes a replica's server after it
    has loaded its class's module, and before the class: so a module calls this."""
    from ray.serve._private import replica

    make = getattr(replica, "create_grpc_server_with_interceptors", None)
    if make is None:  # of another Ray than was tested
        log.warning("proxies' pings would break their connections to this gateway: Ray has another server")
        return

    def patient(*given: Any, options: Any = None, **more: Any) -> Any:
        return make(*given, options=[*(options or ()), *OF_SERVER], **more)

    replica.create_grpc_server_with_interceptors = patient


def _ms(seconds: float) -> int:
    return max(1, round(1e3 * seconds))
