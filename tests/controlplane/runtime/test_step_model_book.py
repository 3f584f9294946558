"""When step models are computed again: in a thread, for a base that gets requests, as records change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from controlplane.planning.step_models import StepModels
from controlplane.runtime import step_models as module
from controlplane.runtime.step_models import StepModelBook
from controlplane.settings import Settings
from controlplane.state.records import Phase
from controlplane.state.repository import State
from placement.types import Inventory
from profiler.compiled import records
from profiler.step_time.records import STEP_MODEL, VARIANT
from testkit.controlplane import builders


@pytest.fixture(autouse=True)
async def _soon(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    async with asyncio.timeout(60):
        yield


def state(revision: int) -> State:
    """One base, which one group serves."""
    made = builders.state(builders.model("b", Phase.READY), builders.deployment("b", Phase.DEPLOYED))
    return replace(made, revision=revision)


def models(slots: int, *groups: str) -> StepModels:
    made = records(STEP_MODEL, 1)
    made.slots = slots
    return StepModels(made, records(VARIANT, (1, 1)), dict.fromkeys(groups, 0), {})


class Making:
    """In the place of `step_models`: gives what the test says, in a thread that the test knows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: State | None = None
        self.answer: StepModels | Exception | None = None
        self.asked: list[tuple[int, str]] = []
        self.threads: set[int] = set()
        monkeypatch.setattr(module, "step_models", self._make)
        self.book = StepModelBook(Settings(), lambda: self.state, self._inventory)

    async def _inventory(self) -> Inventory:
        return Inventory(())

    def _make(self, state: State, inventory: Inventory, settings: Settings, base: str, memo: Any) -> Any:
        self.asked.append((state.revision, base))
        self.threads.add(threading.get_ident())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def until(self, found: object) -> None:
        while self.book.of("b") is not found:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Wait until nothing runs, after one more question."""
        self.book.of("b")
        task = self.book._bases["b"].task
        if task is not None:
            await task


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Making:
    return Making(monkeypatch)


async def test_nothing_is_known_before_there_are_records(making: Making) -> None:
    assert making.book.of("b") is None
    assert making.asked == []


async def test_a_new_revision_is_answered_by_a_thread(making: Making) -> None:
    first = making.answer = models(1, "b")
    making.state = state(1)
    assert making.book.of("b") is None
    await making.until(first)
    second = making.answer = models(2, "b")
    await making.idle()
    assert making.book.of("b") is first
    making.state = state(2)
    await making.until(second)
    assert making.asked == [(1, "b"), (2, "b")]
    assert threading.get_ident() not in making.threads


async def test_an_unchanged_model_stays_the_same_object(making: Making) -> None:
    making.state, making.answer = state(1), models(1, "b")
    await making.until(making.answer)
    known, making.answer, making.state = making.answer, models(1, "b"), state(2)
    await making.idle()
    await making.idle()
    assert making.asked[-1] == (2, "b")
    assert making.book.of("b") is known


async def test_step_models_are_computed_again_after_a_failure(making: Making) -> None:
    making.state, making.answer = state(1), ZeroDivisionError("a bug")
    await making.idle()
    making.answer = models(1, "b")
    await making.until(making.answer)


async def test_a_group_that_lacks_a_model_is_looked_for_again(making: Making) -> None:
    """Its node has not reported yet."""
    making.state, making.answer = state(1), models(1)
    await making.until(making.answer)
    making.answer = models(1, "b")
    await making.until(making.answer)
    seen = len(making.asked)
    await making.idle()
    assert len(making.asked) == seen


async def test_records_that_change_often_are_not_followed_one_by_one(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 3600.0)
    making.book._bases["b"] = module._Base(every_s=3600.0)
    making.state, making.answer = state(1), models(1, "b")
    await making.until(making.answer)
    for revision in range(2, 50):
        making.state = state(revision)
        await making.idle()
    assert making.asked == [(1, "b")]


async def test_routers_learn_the_models_of_the_existing_bases(making: Making) -> None:
    told: dict[str, StepModels] = {}
    bases: list[str] = []
    telling = asyncio.create_task(making.book.keep_telling(lambda: bases, told.__setitem__))
    making.state, making.answer = state(1), models(1, "b")
    await asyncio.sleep(0)
    assert making.asked == []
    bases.append("b")
    while told != {"b": making.answer}:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    making.state, making.answer = state(2), models(2, "b")
    while told["b"] is not making.answer:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
