"""Two real Redis servers, a primary and its replica; a proxy leads clients to the present primary."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import threading
import time
from pathlib import Path

import redis

from testkit.redis_server import RedisServer

FOLLOWS_S = 60.0


class _Forward(socketserver.BaseRequestHandler):
    """A connection of the proxy between a client and the server at `port`."""

    port: int

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as server:
            threading.Thread(target=self._back, args=(server,), daemon=True).start()
            while request := self.request.recv(65536):
                server.sendall(request)

    def _back(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while answer := server.recv(65536):
                self.request.sendall(answer)
            self.request.shutdown(socket.SHUT_RDWR)


class RedisPair:
    """`address` stays; a commit at `url` is acknowledged when the replica has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[RedisServer] = []
        try:
            self.primary = self._server()
            self.replica = self._follower(self.primary)
        except BaseException:
            self._end_servers()
            raise
        self._forward: type[_Forward] = type("To", (_Forward,), {"port": self.primary.port})
        self._proxy = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._forward)
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self._proxy.server_address[1]}/0"

    @property
    def url(self) -> str:
        return f"{self.address}?replicas=1"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The primary's."""
        return self.primary.process

    def kill(self) -> None:
        """The primary, which has no failover."""
        self.primary.kill()

    def start(self) -> None:
        """The primary again, on its data."""
        self.primary.start()
        _wait_until_it_follows(self.replica)

    def lag(self) -> None:
        """From now on the replica receives nothing."""
        with redis.Redis(port=self.replica.port) as client:
            client.replicaof("127.0.0.1", 1)

    def fail_over(self) -> None:
        """Kill the primary, and lead clients to the replica, which has no replica itself."""
        self.primary.kill()
        with redis.Redis(port=self.replica.port) as client:
            client.replicaof("NO", "ONE")
        self._forward.port = self.replica.port
        self.primary = self.replica
        self.primary.options = ()  # after a restart it follows no primary

    def follow(self) -> None:
        """A new replica, after a failover."""
        self.replica = self._follower(self.primary)

    def stop(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._end_servers()

    def _end_servers(self) -> None:
        for server in self._servers:
            server.kill()  # one that has just begun to follow another does not end when it is asked to

    def _server(self, *options: str) -> RedisServer:
        folder = self._folder / str(len(self._servers))
        folder.mkdir(parents=True)
        self._servers.append(RedisServer(folder, *options))
        return self._servers[-1]

    def _follower(self, primary: RedisServer) -> RedisServer:
        follower = self._server("--replicaof", f"127.0.0.1 {primary.port}")
        _wait_until_it_follows(follower)
        return follower


def _wait_until_it_follows(follower: RedisServer) -> None:
    with redis.Redis(port=follower.port) as client:
        deadline = time.monotonic() + FOLLOWS_S
        while client.info("replication")["master_link_status"] != "up":
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected a replica that follows its primary within {FOLLOWS_S:.0f} s")
            time.sleep(0.02)
