"""Variants that are read ahead of their requests, which wait for their turn at a gateway. One at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from workers.messages import VariantRef

log = logging.getLogger(__name__)

MOST = 8  # that wait to be read; more would drive each other from host memory before they are asked


class WantedVariants:
    """`read` has one in host memory, and may raise: then its requests are told."""

    def __init__(self, read: Callable[[VariantRef], Awaitable[None]]) -> None:
        self._read = read
        self._waiting: dict[int, VariantRef] = {}
        self._reading: asyncio.Task[None] | None = None

    def add(self, variant: VariantRef) -> None:
        """To be called in the loop that reads."""
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
                log.info("variant %s was not read ahead: %s", variant.name, e)
            finally:
                self._waiting.pop(variant.uid, None)

    def discard(self, uid: int) -> None:
        """It is to be forgotten: it must not be read after that."""
        self._waiting.pop(uid, None)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
