"""Close Serve's Python proxy on the head.

Behind HAProxy Serve still starts this proxy, for applications that scale to zero; ours never do. It would be
a second entry without HAProxy's limits. Serve calls `prepare` before the proxy listens; the proxy then ends
each connection. Serve also calls `prepare` before a gateway listens; there it changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any


def prepare() -> list[Any]:
    """Return no middlewares; Serve asks for them (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`)."""
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
    """A protocol that replaces uvicorn's and closes every connection."""

    def __init__(self, *its: Any, **named: Any) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # A reset: the kernel forgets the connection at once, and a process can listen on the port again.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
