"""Variants that are read before their requests, which still wait at a gateway. One at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from workers.messages import VariantRef

log = logging.getLogger(__name__)

MOST = 8  # waiting to be read; more would evict each other from host memory before their requests come


class WantedVariants:
    """The variants to read ahead. `read` loads a variant into host memory; if it raises, the variant's
    requests report the error.
    """

    def __init__(self, read: Callable[[VariantRef], Awaitable[None]]) -> None:
        self._read = read
        self._waiting: dict[int, VariantRef] = {}
        self._reading: asyncio.Task[None] | None = None

    def add(self, variant: VariantRef) -> None:
        """Add a variant; must be called in the loop that reads."""
        if len(self._waiting) < MOST:
            self._waiting.setdefault(variant.uid, variant)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        while self._waiting:
            variant = self._waiting[next(iter(self._waiting))]
            try:
                await self._read(variant)
            except Exception as e:
                log.info("variant %s could not be read ahead of its request: %s", variant.name, e)
            finally:
                self._waiting.pop(variant.uid, None)

    def discard(self, uid: int) -> None:
        """Drop a variant that will be forgotten: it must not be read afterwards."""
        self._waiting.pop(uid, None)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
