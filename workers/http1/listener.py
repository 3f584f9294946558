"""A server that listens on a socket, and that can end without breaking off its answers."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

from workers.http1.server_connection import ServerConnection, Serving

BACKLOG = 2048


class Listener:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._servers: list[asyncio.AbstractServer] = []

    @property
    def is_open(self) -> bool:
        return bool(self._servers) and all(server.is_serving() for server in self._servers)

    async def open(self, sock: socket.socket) -> None:
        """Listen on a bound socket, which from now on is the listener's. It may have several sockets."""
        loop = asyncio.get_running_loop()
        is_local = sock.family == socket.AF_UNIX
        serve: Any = loop.create_unix_server if is_local else loop.create_server
        make = partial(ServerConnection, self._serving, loop)
        self._servers.append(await serve(make, sock=sock, backlog=BACKLOG))

    async def close(self, grace_s: float) -> None:
        """Free the port. Requests may be answered for `grace_s`; then their connections and tasks end."""
        for server in self._servers:
            server.close()
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
