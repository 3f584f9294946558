"""A protocol that closes every connection, in place of uvicorn's.

Serve's Python proxy chooses uvicorn's protocol by its name, and Serve has no option to start without it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from profiler.patches.target import Target

PROTOCOL = Target("uvicorn.protocols.http.auto", "AutoHTTPProtocol", read={"0.54": "3253d9e333ec"})


def install() -> None:
    """Close every connection of the servers that this process starts from now on."""
    PROTOCOL.replace(lambda _: Closed)


class Closed(asyncio.Protocol):
    """Closes every connection."""

    def __init__(self, *its: Any, **named: Any) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # A reset: the kernel forgets the connection at once, and a process can listen on the port again.
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
