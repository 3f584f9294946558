"""Messages between the scheduler and the loaders of all ranks, over ZeroMQ.

The scheduler listens at one address, and ranks connect to it; each side has one thread that owns its socket.
A message is one JSON object. An address that other hosts can reach has a token (`with_token`), and the
scheduler ignores messages without it. Only the socket file's user can use a socket file.
"""

from __future__ import annotations

import hmac
import itertools
import json
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

import zmq

log = logging.getLogger(__name__)

Message = dict[str, Any]
POLL_MS = 1000
_PIPES = itertools.count()
TOKEN_BYTES = 16
UNLIMITED = 0  # messages that wait for one end: a full queue would block a thread, or lose messages


def with_token(address: str) -> str:
    """An address with a token: messages without the token are ignored."""
    return f"{address}#{secrets.token_hex(TOKEN_BYTES)}"


def _split(address: str) -> tuple[str, bytes]:
    """The address and its token, which is empty for a socket file."""
    if not address.startswith("tcp://"):
        return address, b""
    place, _, token = address.partition("#")
    return place, token.encode()


class _Socket:
    """A socket and the one thread that owns it: it sends messages of all threads, and handles incoming
    ones.
    """

    def __init__(self, kind: int, address: str) -> None:
        self._place, self._token = _split(address)
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(UNLIMITED)

    def _start(self, name: str) -> None:
        """Start the thread, once the socket is bound or connected."""
        self._wake = _Pipe(self._context)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._wake.put([])
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.out, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._wake.out in ready and (parts := self._wake.take()):
                self._socket.send_multipart(parts)
            if self._socket in ready:
                self._handle(*self._socket.recv_multipart())
        self._socket.close()
        self._wake.close()

    def _handle(self, *parts: bytes) -> None:
        """Handle one message. Must not raise: all variants depend on this thread."""
        raise NotImplementedError


class SchedulerSocket(_Socket):
    """The scheduler's end. `received(sender, message)` runs in the socket's thread; any thread may call
    `send`.
    """

    def __init__(self, address: str, received: Callable[[bytes, Message], None]) -> None:
        super().__init__(zmq.ROUTER, address)
        self._received = received
        self._socket.bind(self._place)
        self._start("variant-scheduler-socket")

    def send(self, to: bytes, message: Message) -> None:
        self._wake.put([to, json.dumps(message).encode()])

    def _handle(self, *parts: bytes) -> None:
        sender, *rest = parts
        try:
            token, body = rest
            if hmac.compare_digest(token, self._token):
                self._received(sender, json.loads(body))
            else:
                log.warning("a message of %r without this engine's token was dropped", sender)
        except Exception:  # one bad message must not end the thread that all variants depend on
            log.exception("a message of %r could not be handled", sender)


class RankSocket(_Socket):
    """The end of a rank (or of an observer). `received(message)` runs in the socket's thread."""

    def __init__(self, address: str, name: str, received: Callable[[Message], None]) -> None:
        super().__init__(zmq.DEALER, address)
        self._received = received
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(self._place)
        self._start(f"variant-rank-socket-{name}")

    def send(self, message: Message) -> None:
        self._wake.put([self._token, json.dumps(message).encode()])

    def _handle(self, *parts: bytes) -> None:
        try:
            (body,) = parts
            self._received(json.loads(body))
        except Exception:
            log.exception("a message of the scheduler could not be handled")


class _Pipe:
    """Passes messages of any thread to the thread that owns the socket."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        address = f"inproc://variant-{next(_PIPES)}"
        self.out = context.socket(zmq.PULL)
        self.out.set_hwm(UNLIMITED)
        self.out.bind(address)
        self._in = context.socket(zmq.PUSH)
        self._in.setsockopt(zmq.LINGER, 0)
        self._in.set_hwm(UNLIMITED)
        self._in.connect(address)
        self._lock = threading.Lock()

    def put(self, parts: list[bytes]) -> None:
        """Pass a message, or only a wake-up if `parts` is empty. Does nothing after `close`."""
        with self._lock:
            if not self._in.closed:
                self._in.send_multipart(parts or [b""])

    def take(self) -> list[bytes]:
        """The parts of one `put`; empty for a wake-up."""
        parts: list[bytes] = self.out.recv_multipart()
        return [] if parts == [b""] else parts

    def close(self) -> None:
        with self._lock:
            self._in.close()
        self.out.close()
