"""A gateway's sign of life: a separate port at which a thread answers HAProxy's checks.

A gateway with many requests may take seconds to start another request. A gateway that hangs, or whose node is
cut off, answers nothing. In both cases the gateway's loop would leave a check unanswered. A thread runs
within milliseconds, however busy the loop is.
"""

from __future__ import annotations

import contextlib
import socket
import threading

# The distance from a gateway's port to the port of its sign of life. Gateways of a node have fewer ports than
# this.
OFFSET = 50
_ANSWER = b"HTTP/1.0 200 OK\r\ncontent-length: 7\r\n\r\nsuccess"
_REFUSAL = b"HTTP/1.0 405 Method Not Allowed\r\ncontent-length: 0\r\n\r\n"
_WAIT_S = 1.0  # for a check's request


class SignOfLife:
    """A thread that answers checks of the gateway at `port`, from now on until it is closed. Raises
    OSError."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port + OFFSET), family=family)
        threading.Thread(target=self._answer, name="sign of life", daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # this ends the thread's wait

    def _answer(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except ConnectionAbortedError:
                    continue
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):  # the check disconnected
                    connection.settimeout(_WAIT_S)
                    is_check = connection.recv(4096).startswith(b"GET ")
                    connection.sendall(_ANSWER if is_check else _REFUSAL)
