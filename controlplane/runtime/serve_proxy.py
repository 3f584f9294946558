"""What Serve's own proxy is told before it listens: bounds on what a client may send, and leave unread; and
to ping gateways."""

from __future__ import annotations

import logging
from typing import Any

from controlplane.runtime import gateway_pings
from controlplane.runtime.proxy_shedding import shedding_connections
from controlplane.settings import Settings

log = logging.getLogger(__name__)

# So much of an answer a gateway may send before the proxy takes it; gRPC would let it grow to megabytes each.
WINDOW_BYTES = 32 << 10
_NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))


def bound_connections() -> list[Any]:
    """Have servers that uvicorn starts in this process from now on bound connections, and channels to
    replicas hold little and notice who is silent. Returns no middlewares, which Serve's proxy asks for: they
    would come too late."""
    from uvicorn.protocols.http import auto

    auto.AutoHTTPProtocol = shedding_connections()
    _set_up_channels((*_NARROW, *gateway_pings.of_channel(Settings().silent_s)))
    return []


def _set_up_channels(ours: tuple[tuple[str, int], ...]) -> None:
    from ray.serve._private.constants import RAY_SERVE_PROXY_USE_GRPC
    from ray.serve._private.request_router import replica_wrapper

    if not RAY_SERVE_PROXY_USE_GRPC:
        log.warning(
            "requests do not go over gRPC (RAY_SERVE_PROXY_USE_GRPC=1): the proxy waits for gateways that"
            " hang, and may hold megabytes of each answer nobody reads"
        )
        return
    make = getattr(replica_wrapper, "init_grpc_channel", None)
    if make is None:  # of another Ray than was tested
        log.warning(
            "the proxy's channels are Ray's own: it may hold megabytes of each answer nobody reads, and waits"
            " for gateways that hang"
        )
        return

    def with_ours(address: str, options: Any = None, **more: Any) -> Any:
        return make(address, options=[*(options or ()), *ours], **more)

    replica_wrapper.init_grpc_channel = with_ours
