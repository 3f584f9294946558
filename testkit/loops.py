"""An event loop that runs in a thread, for engines in the process of the tests; and waiting in a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread, closed afterwards. vLLM's client leaves its sockets to an open loop; when
    that client is collected, its context would wait for them for ever."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def until(holds: Callable[[], object], timeout_s: float = 90.0) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
