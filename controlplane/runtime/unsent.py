"""What Serve keeps of an answer on its way to the proxy, bounded.

Serve's way out of a replica is a queue without a bound: an application's `send` returns at once, however long
its client reads nothing, and all that an engine writes piles up in the gateway. Here `send` waits while more
than so many bytes of the answer were not taken by the proxy; then the gateway reads no more of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from contextvars import ContextVar
from typing import Any

log = logging.getLogger(__name__)

# A message beside its bytes: a dict, an object of bytes, its place in the queue.
MESSAGE_BYTES = 512
TESTED = "2.60."
_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Unsent:
    """Bytes of one answer. The application may run in another thread than its queue."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._waiter: _Waiter | None = None

    def add(self, message: Any) -> None:
        with self._lock:
            self._bytes += cost_bytes(message)

    def take(self, messages: list[Any]) -> None:
        """They are on their way."""
        with self._lock:
            self._bytes -= sum(map(cost_bytes, messages))
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            with contextlib.suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_wake, future)

    async def room(self) -> None:
        """Wait until there is."""
        while (future := self._crowded()) is not None:
            await future

    def _crowded(self) -> asyncio.Future[None] | None:
        """What becomes done when some of it is taken; None: there is room."""
        with self._lock:
            if self._bytes <= self._limit_bytes:
                return None
            if self._waiter is None or self._waiter[1].done():
                loop = asyncio.get_running_loop()
                self._waiter = loop, loop.create_future()
            return self._waiter[1]


def cost_bytes(message: Any) -> int:
    return MESSAGE_BYTES + len(message.get("body", b""))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_current: ContextVar[Unsent] = ContextVar("unsent")


def bound_answers(limit_bytes: int) -> None:
    """Have every answer of this replica wait for its client. Called from a deployment's constructor."""
    import ray
    from ray.serve._private import replica

    if not ray.__version__.startswith(TESTED):
        log.warning(
            "answers that nobody reads are kept whole: expected Ray %s, got %s", TESTED, ray.__version__
        )
        return
    call = replica.UserCallableWrapper._call_http_entrypoint
    queue = replica.MessageQueue

    class BoundedQueue(queue):  # type: ignore[misc, valid-type]
        """Made anew for each request, in the context that its application then runs in."""

        def __init__(self) -> None:
            super().__init__()
            self._unsent = Unsent(limit_bytes)
            _current.set(self._unsent)

        def get_messages_nowait(self) -> list[Any]:
            messages: list[Any] = super().get_messages_nowait()
            self._unsent.take(messages)
            return messages

    def paced(wrapper: Any, method: Any, scope: Any, receive: Any, send: Any) -> Any:
        unsent = _current.get(None)
        if unsent is None:
            return call(wrapper, method, scope, receive, send)

        async def sending(message: Any) -> None:
            unsent.add(message)
            await send(message)
            await unsent.room()

        return call(
            wrapper, method, scope, receive, sending
        )  # a coroutine, or a future of the other thread's

    replica.MessageQueue = BoundedQueue
    replica.UserCallableWrapper._call_http_entrypoint = paced
