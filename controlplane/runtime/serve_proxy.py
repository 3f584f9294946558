"""What Serve's own proxy is told before it listens: bounds on what a client may send, and leave unread."""

from __future__ import annotations

import logging
from typing import Any

from controlplane.runtime.proxy_shedding import shedding_connections

log = logging.getLogger(__name__)

# So much of an answer a gateway may send before the proxy takes it; gRPC would let it grow to megabytes each.
WINDOW_BYTES = 32 << 10
_CHANNEL = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))


def bound_connections() -> list[Any]:
    """Have servers that uvicorn starts in this process from now on bound connections, and channels to
    replicas hold little. Returns no middlewares, which Serve's proxy asks for: they would come too late."""
    from uvicorn.protocols.http import auto

    auto.AutoHTTPProtocol = shedding_connections()
    _narrow_channels()
    return []


def _narrow_channels() -> None:
    from ray.serve._private.request_router import replica_wrapper

    make = getattr(replica_wrapper, "init_grpc_channel", None)
    if make is None:  # of another Ray than was tested
        log.warning("the proxy's channels are Ray's own: it may hold megabytes of each answer nobody reads")
        return

    def narrow(address: str, options: Any = None, **more: Any) -> Any:
        return make(address, options=[*(options or ()), *_CHANNEL], **more)

    replica_wrapper.init_grpc_channel = narrow
