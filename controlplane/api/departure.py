"""Ending work whose client has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

log = logging.getLogger(__name__)

T = TypeVar("T")


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`; None when the client left, which cancels it.

    `receive` has given the whole body, and tells of nothing but the disconnect. Another cancellation passes
    through, and so does what `work` raises.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as e:  # the server's own; the answer may still be wanted
            log.info("it cannot be seen whether a client leaves: %r", e)
            return
        left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not left or task.uncancel():
            raise
        return None
    finally:
        watching.cancel()
