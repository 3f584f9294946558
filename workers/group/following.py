"""The handle of a follower's process, in the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

from workers.group.follower import ORDERS, Order

END_WAIT_S = 15.0


class Following:
    """Starts the follower at once. It ends when this process ends, for any reason."""

    def __init__(self, order: Order) -> None:
        self._reason_fd, tell = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.group.follower", order.config.group_name],
            stdin=subprocess.PIPE,
            pass_fds=[tell],
        )
        os.close(tell)
        assert self._process.stdin is not None
        self._process.stdin.write(ORDERS.dump_json(replace(order, tell=tell)) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> str:
        """Block until it ends; returns the reason. Only one thread may call this."""
        with open(self._reason_fd, "rb") as pipe:
            reason = pipe.read().decode(errors="replace")
        return reason or f"the ranks' process ended with {describe(self._process.wait())}"

    def close(self) -> None:
        """End the follower and its ranks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
