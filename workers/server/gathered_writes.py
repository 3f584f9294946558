"""HTTP/1.1 by uvicorn with one write for what it would write piece by piece.

uvicorn writes an answer's head, each piece of its body and its end apart, and uvloop hands each to the kernel
at once. On loopback a write takes about as long as all Python around it, and the other side wakes for each.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# So much leaves at once, before the turn ends.
LIMIT_BYTES = 64 * 1024


class GatheredWrites:
    """A transport whose writes within one turn of the loop leave as one; all else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0
        self._planned = False

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > LIMIT_BYTES:
            self.flush()
        elif not self._planned:
            self._planned = True
            self._loop.call_soon(self._end_turn)

    def flush(self) -> None:
        """Write what was gathered, now."""
        if self._parts:
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts, self._size = [], 0
            self._transport.write(whole)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def _end_turn(self) -> None:
        self._planned = False
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's protocol over such a transport. A whole answer does not wait for the turn's end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathered = GatheredWrites(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._gathered))

    def on_response_complete(self) -> None:
        self._gathered.flush()
        super().on_response_complete()
