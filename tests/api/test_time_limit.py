"""A limit on time does what asyncio's own does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from controlplane.api.time_limit import TimeLimit, WriteLimit

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
async def test_an_error_of_the_work_passes(limit: Callable[[float], Any]) -> None:
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
    """The work's own error passes even if it comes together with the limit's."""
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


async def test_a_paused_limit_continues_and_then_expires() -> None:
    reached = []

    async def work() -> None:
        with TimeLimit(0.01) as limit:
            limit.pause()
            await asyncio.sleep(0.1)
            reached.append(True)
            limit.go_on()
            reached.append(False)

    with pytest.raises(TimeoutError):
        await work()
    assert reached == [True]


async def test_writing_is_limited_message_by_message_and_what_is_between_is_not() -> None:
    sent = []

    async def send(message: Any) -> None:
        if message["type"] == "last":
            await asyncio.Event().wait()
        sent.append(message["type"])

    async def work() -> None:
        with WriteLimit(0.05, send) as limit:
            for kind in ("first", "next", "last"):
                await asyncio.sleep(0.1)
                await limit.send({"type": kind})

    with pytest.raises(TimeoutError):
        await work()
    assert sent == ["first", "next"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
