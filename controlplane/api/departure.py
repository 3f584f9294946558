"""Ending work whose client has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import Receive

from workers.asgi import DirectRequest

log = logging.getLogger(__name__)

T = TypeVar("T")


async def unless_client_leaves(
    receive: Receive, work: Awaitable[T], direct: DirectRequest | None = None
) -> T | None:
    """The result of `work`; None when the client left, which cancels `work`.

    `receive` has given the whole body, and now reports only the disconnect. Our own server reports it by
    `direct`; for any other server a task waits for it. Another cancellation passes through, and so does an
    error of `work`.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    stop = _watched(receive, leave) if direct is None else direct.call(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise
        return None
    finally:
        stop()


def _watched(receive: Receive, leave: Callable[[], None]) -> Callable[[], object]:
    """Call `leave` when the client leaves, until the returned function is called."""

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as e:  # the server's own error; the client may still want the answer
            log.info("the gateway cannot see whether a client has left: %r", e)
            return
        leave()

    return asyncio.create_task(watch()).cancel
