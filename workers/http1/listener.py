"""A server that listens on a socket, and that can end without breaking off its answers."""

from __future__ import annotations

import asyncio
import socket

from workers.http1.server_connection import ServerConnection, Serving

BACKLOG = 2048


class Listener:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._server: asyncio.Server | None = None

    @property
    def is_open(self) -> bool:
        return self._server is not None and self._server.is_serving()

    async def open(self, sock: socket.socket) -> None:
        """Listen on a bound socket, which from now on is the listener's."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ServerConnection(self._serving, loop), sock=sock, backlog=BACKLOG
        )

    async def close(self, grace_s: float) -> None:
        """Free the port. Requests may be answered for `grace_s`; then their connections and tasks end."""
        if self._server is None:
            return
        self._server.close()
        tasks, connections = self._serving.tasks, self._serving.connections
        for connection in list(connections):
            connection.shutdown()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(connections):
            connection.cut()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
