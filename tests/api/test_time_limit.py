"""A limit on time does what asyncio's own does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from controlplane.api.time_limit import TimeLimit

FOREVER = 3600.0


@contextlib.asynccontextmanager
async def asyncios(limit_s: float) -> Any:
    async with asyncio.timeout(limit_s):
        yield


@contextlib.asynccontextmanager
async def ours(limit_s: float) -> Any:
    with TimeLimit(limit_s):
        yield


LIMITS = [asyncios, ours]


@pytest.mark.parametrize("limit", LIMITS)
async def test_work_in_time(limit: Callable[[float], Any]) -> None:
    async with limit(FOREVER):
        await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("limit", LIMITS)
async def test_work_that_takes_too_long(limit: Callable[[float], Any]) -> None:
    with pytest.raises(TimeoutError):
        async with limit(0.0):
            await asyncio.sleep(FOREVER)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("limit", LIMITS)
async def test_what_work_raises_passes(limit: Callable[[float], Any]) -> None:
    async def work() -> None:
        async with limit(0.0):
            try:
                await asyncio.sleep(FOREVER)
            finally:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("limit_s", [FOREVER, 0.0])
async def test_another_cancellation_passes(limit: Callable[[float], Any], limit_s: float) -> None:
    """Also one that comes together with the limit's."""
    inside = asyncio.Event()

    async def work() -> None:
        async with limit(limit_s):
            inside.set()
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                if limit_s == 0.0:
                    task.cancel()
                raise

    task = asyncio.create_task(work())
    await inside.wait()
    if limit_s == FOREVER:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
