"""A separate real Redis, which can be killed and started again."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import NoReturn

import redis


def free_port() -> int:
    """A port that the kernel does not assign by itself, below the ports of Ray's workers and of a Redis
    Cluster node (+10000); so it stays free until the caller listens there."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """A redis-server of our own: its data in `folder`, each acknowledged write on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        for _ in range(3):
            self.port = free_port()
            if self._start():
                return
        self._fail()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start again, on the same port and data."""
        if not self._start():
            self._fail()

    def _fail(self) -> NoReturn:
        raise RuntimeError(
            f"redis-server did not start: exit {self.process.returncode}; see {self.folder}/redis.log"
        )

    def _start(self) -> bool:
        """Tell whether the server started; it does not if another process took the port meanwhile."""
        self.process = subprocess.Popen(
            [
                redis_binary(),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
                *("--logfile", str(self.folder / "redis.log"), *self.options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.02)
        return True

    def _is_up(self) -> bool:
        """Tell whether the answering server is this one, with its data loaded."""
        with contextlib.suppress(redis.RedisError), redis.Redis(port=self.port) as client:
            return bool(client.info("server")["process_id"] == self.process.pid and client.ping())
        return False

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL: data that was not on disk or in the kernel is lost."""
        self.process.kill()
        self.process.wait(60)


def redis_binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise RuntimeError("redis-server is missing; install it: apt-get install redis-server")
    return found
