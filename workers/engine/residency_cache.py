"""The residency of an engine's variants, from its scheduler, cached until it may have changed.

`workers.scheduling.residency` makes the report. It is sent as JSON, so ranks are strings there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from workers.messages import EngineResidency, RankBytes, VariantPlace
from workers.tiers import Tier

# A report this recent is reused: a new report takes the lock that every step of the scheduler needs.
FRESH_S = 0.5


def residency_of(state: Mapping[str, Any]) -> EngineResidency:
    return EngineResidency(
        slots=state["slots"],
        limit=state["limit"],
        skips=state["skips"],
        preemptions=state["preemptions"],
        blocked=state["blocked"],
        variants=tuple(_place(v) for v in state["variants"]),
    )


def _place(variant: Mapping[str, Any]) -> VariantPlace:
    in_memory = {**variant["staying_bytes"], **variant["host_bytes"]}
    host = {int(rank): size for rank, size in in_memory.items()}
    device = {int(rank): size for rank, size in variant["device_bytes"].items()}
    ranks = tuple(RankBytes(r, host.get(r, 0), device.get(r, 0)) for r in sorted({*host, *device}))
    return VariantPlace(variant["uid"], Tier(variant["tier"]), variant["slot"], ranks, variant["reason"])


class ResidencyWatch:
    """Requests a residency report on demand; callers at the same time and shortly after share it."""

    def __init__(
        self, ask: Callable[[], Awaitable[EngineResidency]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._asked_s = 0.0
        self._answer: asyncio.Task[EngineResidency] | None = None

    async def get(self) -> EngineResidency:
        """The report. Raises the errors of `ask`."""
        if self._answer is None or self._is_stale(self._answer):
            self._asked_s = self._clock()
            self._answer = asyncio.ensure_future(self._asking())
        return await asyncio.shield(self._answer)

    def forget(self) -> None:
        """Drop the cached report after a change: the next report must show it."""
        self._answer = None

    def _is_stale(self, answer: asyncio.Task[EngineResidency]) -> bool:
        if not answer.done():
            return False
        failed = answer.cancelled() or answer.exception() is not None
        return failed or self._clock() - self._asked_s > FRESH_S

    async def _asking(self) -> EngineResidency:
        return await self._ask()
