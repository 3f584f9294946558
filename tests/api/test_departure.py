"""Work goes on until its client leaves, and ends then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from controlplane.api.departure import unless_client_leaves


class Line:
    """A server's `receive`; its client leaves on demand."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.failure: Exception | None = None
        self.waiting = False

    async def receive(self) -> Any:
        self.waiting = True
        try:
            await self.leaves.wait()
        finally:
            self.waiting = False
        if self.failure:
            raise self.failure
        return {"type": "http.disconnect"}


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_returns_its_result_and_the_listener_is_gone() -> None:
    line = Line()

    async def work() -> int:
        await settled()
        assert line.waiting
        return 7

    assert await unless_client_leaves(line.receive, work()) == 7
    await settled()
    assert not line.waiting


async def test_a_client_that_leaves_ends_the_work() -> None:
    line, cleaned = Line(), asyncio.Event()

    async def work() -> bool:
        try:
            return await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # closing a connection may take a turn
            cleaned.set()

    asyncio.get_running_loop().call_soon(line.leaves.set)
    assert await unless_client_leaves(line.receive, work()) is None
    assert cleaned.is_set()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await settled()  # nothing is left to be cancelled


async def test_an_error_of_the_work_passes() -> None:
    line = Line()

    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await unless_client_leaves(line.receive, work())


@pytest.mark.parametrize("leaves_too", [False, True])
async def test_another_cancellation_passes(leaves_too: bool) -> None:
    line, begun = Line(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(unless_client_leaves(line.receive, work()))
    await begun.wait()
    task.cancel()
    if leaves_too:
        line.leaves.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_time_limit_within_the_work_is_its_own() -> None:
    line = Line()

    async def work() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "in time"

    assert await unless_client_leaves(line.receive, work()) == "late"


async def test_a_server_without_disconnects_does_not_end_the_work() -> None:
    line, may_end = Line(), asyncio.Event()
    line.failure = RuntimeError("no longer known")

    async def work() -> int:
        line.leaves.set()
        await settled()
        assert not line.waiting
        may_end.set()
        return 7

    assert await unless_client_leaves(line.receive, work()) == 7
    assert may_end.is_set()


class CallingServer:
    """A request of a server that calls when its client leaves."""

    def __init__(self) -> None:
        self.leave: Callable[[], None] | None = None

    def body(self) -> bytes | None:
        return None

    def call(self, on_leaving: Callable[[], None]) -> Callable[[], None]:
        self.leave = on_leaving
        return self._forget

    def _forget(self) -> None:
        self.leave = None

    def answer(self, status: int, headers: Any, body: bytes) -> bool:
        return False


async def not_asked() -> Any:
    raise AssertionError("the server tells; nobody is to ask it")


async def test_a_server_that_reports_disconnects_is_not_polled() -> None:
    direct = CallingServer()

    async def work() -> int:
        await settled()
        assert direct.leave is not None
        return 7

    assert await unless_client_leaves(not_asked, work(), direct) == 7
    assert direct.leave is None


async def test_a_leaving_client_ends_the_work_on_a_polled_server() -> None:
    direct, cleaned = CallingServer(), asyncio.Event()

    async def work() -> bool:
        assert direct.leave is not None
        asyncio.get_running_loop().call_soon(direct.leave)
        try:
            return await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    assert await unless_client_leaves(not_asked, work(), direct) is None
    assert cleaned.is_set()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert direct.leave is None
