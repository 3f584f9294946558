"""uvicorn's protocol with a limit on how long a client may leave written data unread.

Unread data is held in the server, in its source, and in the engine. So if no data leaves a connection for
WRITE_S, the connection is cut, with all data that waits for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import struct
import termios
from typing import Any

from workers.server.upgrades import IgnoredUpgrades

# The same as in controlplane.api.request_limits, which this package must not import.
WRITE_S = 17.0
LOOKS = 15  # checks in that time
# The most bytes of an answer that wait in the server before its application does, and in the kernel. The
# kernel would keep megabytes of each answer for a client on the same network.
BUFFER_BYTES = 16 << 10
KERNEL_BYTES = 64 << 10
_NO_LINGERING = struct.pack("ii", 1, 0)


class BoundedWrites(IgnoredUpgrades):
    """A connection that is reset if no data can be written to it, and none leaves it, for `patience` times
    WRITE_S.
    """

    patience = 1
    _stall_timer: asyncio.TimerHandle | None = None
    _least_unsent = math.inf
    _moved_s = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
            transport.set_write_buffer_limits(BUFFER_BYTES)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._least_unsent, self._moved_s = math.inf, self.loop.time()
            self._look_at_writes_later(self.patience * WRITE_S / LOOKS)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        super().connection_lost(exc)

    def _forget_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _look_at_writes_later(self, after_s: float) -> None:
        self._stall_timer = self.loop.call_later(after_s, self._look_at_writes)

    def _look_at_writes(self) -> None:
        unsent, now_s = self._unsent_bytes(), self.loop.time()
        if unsent < self._least_unsent < math.inf:
            self._moved_s = now_s
        self._least_unsent = min(unsent, self._least_unsent)
        limit_s = self.patience * WRITE_S
        left_s = self._moved_s + limit_s - now_s
        if left_s > 1e-9:  # tolerance for rounding
            self._look_at_writes_later(min(left_s, limit_s / LOOKS))
        else:
            self._stall_timer = None
            self._reset()

    def _unsent_bytes(self) -> int:
        """Unsent bytes in this process and in the kernel, which accepts more only when much of its data has
        left.
        """
        held = self.transport.get_write_buffer_size()
        try:
            of_kernel = fcntl.ioctl(self._socket().fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return held
        return held + int(struct.unpack("i", of_kernel)[0])

    def _reset(self) -> None:
        """Reset the connection, so that the kernel drops its data: a close would offer it to the client for
        minutes.
        """
        self._socket().setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.transport.abort()

    def _socket(self) -> Any:
        return self.transport.get_extra_info("socket")
