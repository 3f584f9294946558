"""The sending side of a connection: few writes, back-pressure, and an end for clients that do not read.

On loopback a write takes about as long as all the Python code around it, and each wakes the other side. So
the data of one turn of the loop is sent as one write.

Unread data is held in the server, in its source, and in the engine. So if no data leaves a connection for
`unread_s`, the connection is reset, with all data that waits for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import struct
import termios
from typing import Any

from workers.http1.limits import ANSWER_BYTES, KERNEL_BYTES

# This many bytes are sent at once, before the turn ends.
GATHERED_BYTES = 64 << 10
LOOKS = 15  # checks in `unread_s`
_ROUNDING_S = 1e-9
_NO_LINGERING = struct.pack("ii", 1, 0)


class Progress:
    """Whether a client reads. Pure. It does not if no less was left unsent for `limit_s`."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._moved_s = now_s
        self._least = math.inf

    def left_s(self, unsent: int, now_s: float) -> float:
        """How long the client may still read nothing."""
        if unsent < self._least < math.inf:
            self._moved_s = now_s
        self._least = min(unsent, self._least)
        left_s = self._moved_s + self._limit_s - now_s
        return left_s if left_s > _ROUNDING_S else 0.0


class Outgoing:
    """What is sent on one transport. `is_paused`: the transport has enough; wait with `drain`."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, unread_s: float
    ) -> None:
        self.is_paused = False
        self._transport = transport
        self._loop = loop
        self._unread_s = unread_s
        self._socket: Any = transport.get_extra_info("socket")
        self._parts: list[bytes] = []
        self._size = 0
        self._planned = False
        self._resumed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
            transport.set_write_buffer_limits(ANSWER_BYTES)

    def write(self, data: bytes) -> None:
        """Send the data at the end of this turn of the loop, with what else is written in it."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > GATHERED_BYTES:
            self.flush()
        elif not self._planned:
            self._planned = True
            self._loop.call_soon(self._end_turn)

    def write_now(self, data: bytes) -> None:
        """Send the data now, after all that was written before."""
        self._parts.append(data)
        self.flush()

    def flush(self) -> None:
        if self._parts:
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts, self._size = [], 0
            self._transport.write(whole)

    def _end_turn(self) -> None:
        self._planned = False
        self.flush()

    async def drain(self) -> None:
        """Wait until the transport takes more, or the connection is lost."""
        while self.is_paused:
            await self._resumed.wait()

    def pause(self) -> None:
        self.is_paused = True
        self._resumed.clear()
        self._progress = Progress(self._unread_s, self._loop.time())
        self._look_later(self._unread_s / LOOKS)

    def resume(self) -> None:
        self.is_paused = False
        self._resumed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lost(self) -> None:
        """The connection has ended: nothing can be sent, so that nothing need wait."""
        self._parts, self._size = [], 0
        self.resume()

    def _look_later(self, after_s: float) -> None:
        self._timer = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        left_s = self._progress.left_s(self._unsent_bytes(), self._loop.time())
        if left_s:
            self._look_later(min(left_s, self._unread_s / LOOKS))
        else:
            self._timer = None
            self._reset()

    def _unsent_bytes(self) -> int:
        """Unsent bytes in this process and in the kernel, which accepts more only when much has left."""
        held = self._transport.get_write_buffer_size()
        try:
            of_kernel = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return held
        return held + int(struct.unpack("i", of_kernel)[0])

    def _reset(self) -> None:
        """Have the kernel drop the connection's data: a close would offer it to the client for minutes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self._transport.abort()
