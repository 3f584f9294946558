"""A gateway's sign of life: a port of its own at which a thread answers HAProxy's checks.

A gateway with many requests may take seconds to get to one more; one that hangs, or whose node is cut off,
answers nothing. Both would leave a check unanswered that its loop answers. A thread gets its turn within
milliseconds, however much the loop has to do.
"""

from __future__ import annotations

import contextlib
import socket
import threading

# From the port of a gateway to that of its sign of life. Gateways of a node have fewer ports than that.
OFFSET = 50
_ANSWER = b"HTTP/1.0 200 OK\r\ncontent-length: 7\r\n\r\nsuccess"
_WAIT_S = 1.0  # for a check's request


class SignOfLife:
    """Answers checks of the gateway at `port`, from now on until it is closed. Raises OSError."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port + OFFSET), family=family)
        threading.Thread(target=self._answer, name="sign of life", daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait

    def _answer(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except ConnectionAbortedError:
                    continue
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):  # a check that left
                    connection.settimeout(_WAIT_S)
                    connection.recv(4096)
                    connection.sendall(_ANSWER)
