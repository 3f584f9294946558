"""Serve's Python proxy on the head, closed.

Behind HAProxy Serve still starts it, for applications that scale to nothing; ours never do. It would be a
second way in, with none of HAProxy's limits. Serve calls `prepare` before it listens: then it ends each
connection that is made to it. So does it before a gateway listens, which is left as it is.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any


def prepare() -> list[Any]:
    """No middlewares, which is what Serve asks for (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`)."""
    if not _is_replica():
        from uvicorn.protocols.http import auto

        auto.AutoHTTPProtocol = Closed
    return []


def _is_replica() -> bool:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


class Closed(asyncio.Protocol):
    """In the place of uvicorn's protocol: answers nobody."""

    def __init__(self, *its: Any, **named: Any) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # A reset: the kernel forgets it at once, and the port can be listened on again.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
