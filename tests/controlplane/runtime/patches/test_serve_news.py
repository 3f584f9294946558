"""Calls for news of replicas, to a controller that is not always reached. Ray's own client, patched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError
from ray.serve._private import long_poll
from ray.serve._private.long_poll import LongPollClient, LongPollState, UpdatedObject

from controlplane.runtime.patches.ray import serve_news


class Ref:
    def __init__(self) -> None:
        self.tell: Callable[[Any], None]

    def _on_completed(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell


class Controller:
    """`calls`: what was asked for, each with its answer to come."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, int], Ref]] = []
        self.listen_for_change = self

    def remote(self, known: dict[str, int]) -> Ref:
        self.calls.append((dict(known), Ref()))
        return self.calls[-1][1]

    async def call(self, number: int) -> Ref:
        while len(self.calls) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return self.calls[number - 1][1]


class Loop:
    """A loop whose timers are noted."""

    def __init__(self, call_later: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self.call_later = call_later
        self.call_soon_threadsafe = loop.call_soon_threadsafe
        self.is_running = loop.is_running


@pytest.fixture(autouse=True)
async def _patched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(LongPollClient, "_poll_next", LongPollClient._poll_next)  # put back afterwards
    monkeypatch.setattr(serve_news, "RETRY_S", 0.01)
    serve_news.keep_asking()
    async with asyncio.timeout(60):
        yield


def client(controller: Controller, told: list[Any]) -> Any:
    return LongPollClient(controller, {"replicas": told.append}, asyncio.get_running_loop(), "c")


async def test_news_come_one_after_the_other() -> None:
    controller, told = Controller(), list[Any]()
    client(controller, told)
    (await controller.call(1)).tell({"replicas": UpdatedObject("one", 7, 0.0)})
    (await controller.call(2)).tell(LongPollState.TIME_OUT)
    (await controller.call(3)).tell({"replicas": UpdatedObject("two", 8, 0.0)})
    await controller.call(4)
    assert told == ["one", "two"]
    assert [known["replicas"] for known, _ in controller.calls] == [-1, 7, 7, 8]


async def test_an_answer_that_is_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S", (0.0, 0.0))
    monkeypatch.setattr(serve_news, "SILENT_S", 0.02)
    controller, told = Controller(), list[Any]()
    client(controller, told)
    lost = await controller.call(1)
    await controller.call(2)
    monkeypatch.setattr(serve_news, "SILENT_S", 1000.0)  # from the next call on
    newest = await controller.call(len(controller.calls))
    newest.tell({"replicas": UpdatedObject("new", 3, 0.0)})
    calls = len(controller.calls)
    await controller.call(calls + 1)
    assert told == ["new"]
    lost.tell({"replicas": UpdatedObject("old", 1, 0.0)})  # it came after all
    await asyncio.sleep(0.01)
    assert told == ["new"]
    assert len(controller.calls) == calls + 1


async def test_each_silence_of_serve_lengthens_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S", (0.0, 0.0))
    monkeypatch.setattr(serve_news, "SILENT_S", 0.01)
    controller, loop = Controller(), asyncio.get_running_loop()
    waits = list[float]()
    call_later = loop.call_later

    def noted(delay_s: float, *rest: Any) -> Any:
        waits.append(delay_s)
        return call_later(delay_s, *rest)

    client(controller, []).event_loop = Loop(noted, loop)  # before its first call
    await controller.call(5)
    assert waits[:4] == [0.01, 0.02, 0.04, 0.08]


async def test_a_client_of_serve_asks_again_after_days_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_poll, "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S", (0.0, 0.0))
    monkeypatch.setattr(serve_news, "MOST_SILENT_S", 0.0)
    controller = Controller()
    client(controller, [])
    await controller.call(1200)  # two to that power is no float


@pytest.mark.parametrize("news", [RaySystemError("lost"), {"replicas": "no object of news"}])
async def test_an_unreadable_answer_ends_no_loop(news: Any) -> None:
    controller, told = Controller(), list[Any]()
    client(controller, told)
    (await controller.call(1)).tell(news)
    (await controller.call(2)).tell({"replicas": UpdatedObject("new", 3, 0.0)})
    await controller.call(3)
    assert told == ["new"]


async def test_a_failed_question_is_asked_again() -> None:
    class Absent(Controller):
        def remote(self, known: dict[str, int]) -> Ref:
            ref = super().remote(known)
            if len(self.calls) < 3:
                raise ConnectionError("no way")
            return ref

    controller = Absent()
    client(controller, [])
    await controller.call(3)


async def test_an_unreachable_controller_is_asked_again() -> None:
    controller, told = Controller(), list[Any]()
    one = client(controller, told)
    (await controller.call(1)).tell(ActorUnavailableError("the network is away", None))
    (await controller.call(2)).tell({"replicas": UpdatedObject("new", 3, 0.0)})
    await controller.call(3)
    assert told == ["new"]
    assert one.is_running


async def test_a_dead_controller_is_not_asked_again() -> None:
    controller = Controller()
    one = client(controller, [])
    (await controller.call(1)).tell(ActorDiedError())
    assert not one.is_running
