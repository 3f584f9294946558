"""A stream that is watched: its items, its end, and what ends it while it hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from controlplane.controller import stream_watchdog
from controlplane.controller.stream_watchdog import watched

Look = Callable[[], Awaitable[None]]


class Stream:
    """Yields these items, then hangs unless it `ends`; `closed` when it had to stop, or ended."""

    def __init__(self, *items: str, ends: bool = True, failure: Exception | None = None) -> None:
        self.items, self.ends, self.failure, self.closed = items, ends, failure, False

    async def tell(self) -> AsyncGenerator[str, None]:
        try:
            for item in self.items:
                yield item
            if self.failure:
                raise self.failure
            if not self.ends:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def follow(items: AsyncGenerator[str, None], look: Look, every_s: float, found: list[str]) -> None:
    async for item in watched(items, look, every_s):
        found.append(item)


async def nothing() -> None:
    pass


async def test_items_come_in_order_and_end() -> None:
    stream = Stream("a", "b")
    assert [item async for item in watched(stream.tell(), nothing, 60.0)] == ["a", "b"]
    assert stream.closed


async def test_an_error_of_the_stream_is_raised_after_its_items() -> None:
    found: list[str] = []
    with pytest.raises(OSError, match="disk full"):
        await follow(Stream("a", failure=OSError("disk full")).tell(), nothing, 60.0, found)
    assert found == ["a"]


async def test_the_watchdog_ends_a_hanging_stream() -> None:
    stream, found, looks = Stream("a", ends=False), list[str](), [0]

    async def look() -> None:
        looks[0] += 1
        if looks[0] == 3:
            raise TimeoutError

    items = stream.tell()
    with pytest.raises(TimeoutError):
        await follow(items, look, 0.001, found)
    assert found == ["a"]
    assert stream.closed
    await items.aclose()  # nothing of it runs any more


async def test_the_watchdog_looks_after_each_item() -> None:
    """However fast they come."""
    found: list[str] = []

    async def look() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await follow(Stream("a", "b").tell(), look, 60.0, found)
    assert found == ["a"]


async def deaf(go: asyncio.Event) -> AsyncGenerator[str, None]:
    while not go.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await go.wait()
    yield "too late"


async def failing_at_its_end() -> AsyncGenerator[str, None]:
    try:
        await asyncio.Event().wait()
        yield ""
    finally:
        raise OSError("its folder is not empty")


async def stubborn() -> AsyncGenerator[str, None]:
    try:
        yield "a"
    finally:
        yield "b"


@pytest.mark.parametrize("kind", ["deaf", "failing", "stubborn"])
async def test_a_stream_that_does_not_stop_does_not_hide_why_it_was_cut_off(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_watchdog, "ENDS_S", 0.01)
    caplog.set_level("WARNING")  # an engine that this process started may have raised it
    go = asyncio.Event()
    made = {"deaf": deaf(go), "failing": failing_at_its_end(), "stubborn": stubborn()}

    async def look() -> None:
        raise TimeoutError("it took too long")

    try:
        with pytest.raises(TimeoutError, match="it took too long"):
            await follow(made[kind], look, 0.001, [])
        assert ("does not end" in caplog.text) == (kind != "failing")  # that one has stopped
    finally:
        go.set()  # nothing else ends the deaf one, and the loop would wait for it


async def test_a_follower_that_stops_closes_the_stream() -> None:
    stream = Stream("a", "b")
    async with contextlib.aclosing(watched(stream.tell(), nothing, 60.0)) as items:
        async for _ in items:
            break
        assert not stream.closed
    assert stream.closed
