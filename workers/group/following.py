"""A follower's process, as whoever starts it holds it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from workers.group.follower import ORDERS, Order

END_WAIT_S = 15.0


class Following:
    """Started at once; it ends with this process, however that does."""

    def __init__(self, order: Order) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ostinato-follower-")
        self._told = Path(self._folder.name) / "told"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.group.follower", order.config.name], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(ORDERS.dump_json(replace(order, told=self._told)) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> str:
        """Until it ends; why it did. Blocking."""
        code = self._process.wait()
        if self._told.exists():
            return self._told.read_text()
        return f"its process ended with {describe(code)}"

    def close(self) -> None:
        """End it and its ranks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
