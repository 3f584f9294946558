"""Messages between the scheduler and the loaders of all ranks, over ZeroMQ.

The scheduler listens at one address, ranks connect to it; each side has one thread that owns its
socket. A message is one JSON object. An address other hosts can reach carries a token (`with_token`), and the
scheduler hears nobody who does not send it with each message; a socket file is its user's alone.
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
UNLIMITED = 0  # messages that wait for one end: a full queue would block a thread, or lose them


def with_token(address: str) -> str:
    """An address at which only those are heard that were told it whole."""
    return f"{address}#{secrets.token_hex(TOKEN_BYTES)}"


def _split(address: str) -> tuple[str, bytes]:
    """Where it is, and its token: empty where it has none, as a socket file."""
    if not address.startswith("tcp://"):
        return address, b""
    place, _, token = address.partition("#")
    return place, token.encode()


class Hub:
    """The scheduler's end. `received(sender, message)` runs in the hub's thread; `send` from any."""

    def __init__(self, address: str, received: Callable[[bytes, Message], None]) -> None:
        self._received = received
        place, self._token = _split(address)
        context: zmq.Context[Any] = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(UNLIMITED)
        self._socket.bind(place)
        self._wake = _Pipe(context)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="variant-hub", daemon=True)
        self._thread.start()

    def send(self, to: bytes, message: Message) -> None:
        self._wake.put([to, json.dumps(message).encode()])

    def close(self) -> None:
        self._closing.set()
        self._wake.put([b"", b""])
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.out, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._wake.out in ready:
                to, body = self._wake.out.recv_multipart()
                if to:
                    self._socket.send_multipart([to, body])
            if self._socket in ready:
                self._handle(*self._socket.recv_multipart())
        self._socket.close()
        self._wake.close()

    def _handle(self, sender: bytes, *parts: bytes) -> None:
        try:
            token, body = parts
            if hmac.compare_digest(token, self._token):
                self._received(sender, json.loads(body))
            else:
                log.warning("a message of %r without this engine's token was dropped", sender)
        except Exception:  # one bad message must not end the thread that all variants depend on
            log.exception("a message of %r could not be handled", sender)


class Line:
    """A rank's (or an onlooker's) end. `received(message)` runs in the line's thread."""

    def __init__(self, address: str, name: str, received: Callable[[Message], None]) -> None:
        self._received = received
        place, self._token = _split(address)
        context: zmq.Context[Any] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(UNLIMITED)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.connect(place)
        self._wake = _Pipe(context)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"variant-line-{name}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._wake.put([json.dumps(message).encode()])

    def close(self) -> None:
        self._closing.set()
        self._wake.put([b""])
        self._thread.join(timeout=5)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.out, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(POLL_MS))
            if self._wake.out in ready:
                (body,) = self._wake.out.recv_multipart()
                if body:
                    self._socket.send_multipart([self._token, body])
            if self._socket in ready:
                self._handle(*self._socket.recv_multipart())
        self._socket.close()
        self._wake.close()

    def _handle(self, *parts: bytes) -> None:
        try:
            (body,) = parts
            self._received(json.loads(body))
        except Exception:
            log.exception("a message of the scheduler could not be handled")


class _Pipe:
    """Hands messages of any thread to the one that owns the socket."""

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
        with self._lock:
            self._in.send_multipart(parts)

    def close(self) -> None:
        with self._lock:
            self._in.close()
        self.out.close()
