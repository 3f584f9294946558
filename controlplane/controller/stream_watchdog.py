"""Items of a stream that may hang, with a look at something else while none comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)

ENDS_S = 10.0  # as long is waited for a stream that is cut off


async def watched(
    items: AsyncGenerator[str, None], look: Callable[[], Awaitable[None]], every_s: float
) -> AsyncGenerator[str, None]:
    """The items. What `look` raises, every so often and after each item, ends them; they are closed then."""
    try:
        while True:
            item = await _watched(items, look, every_s)
            if item is None:
                return
            yield item
            await look()
    finally:
        await _close(items)


async def _watched(
    items: AsyncIterator[str], look: Callable[[], Awaitable[None]], every_s: float
) -> str | None:
    """The next item, None at their end; cut off when a look fails."""
    coming = asyncio.ensure_future(_next(items))
    try:
        while not coming.done():
            await asyncio.wait({coming}, timeout=every_s)
            if not coming.done():
                await look()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming}, timeout=ENDS_S)
    return coming.result()


async def _next(items: AsyncIterator[str]) -> str | None:
    return await anext(items, None)


async def _close(items: AsyncGenerator[str, None]) -> None:
    """Of one that does not stop, or fails at that, what cut it off is to be told and not this."""
    try:
        await items.aclose()
    except Exception as e:
        log.warning("a stream that was cut off does not stop: %r", e)
