"""The items of a stream that may hang, with a regular check whether to continue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

log = logging.getLogger(__name__)

ENDS_S = 10.0  # longest wait for the end of a stream that is cut off


async def watched(
    items: AsyncGenerator[str, None], look: Callable[[], Awaitable[None]], every_s: float
) -> AsyncGenerator[str, None]:
    """The items. `look` is called every `every_s` and after each item; an error that it raises closes
    them."""
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
    """The next item, None at the end; cut off when `look` raises."""
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
    """Close the stream. A failure is only logged, so that the reason for closing is the error that is
    raised."""
    try:
        await items.aclose()
    except Exception as e:
        log.warning("a stream of events that was cut off does not end: %r", e)
