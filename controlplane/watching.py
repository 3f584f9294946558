"""Items of a stream that may hang, with a look at something else while none comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

ENDS_S = 10.0  # as long is waited for a stream that is cut off


async def watched(
    items: AsyncIterator[str], look: Callable[[], Awaitable[None]], every_s: float
) -> AsyncGenerator[str, None]:
    """The items. What `look` raises, every so often and after each item, ends them."""
    while True:
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
        item = coming.result()
        if item is None:
            return
        yield item
        await look()


async def _next(items: AsyncIterator[str]) -> str | None:
    return await anext(items, None)
