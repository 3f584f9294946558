"""A chat whose template takes long delays no chat of another tenant."""

from __future__ import annotations

import asyncio
import threading

import pytest

from workers.engine.template_turns import TemplateTurns
from workers.engine.tenant_queue import AT_ONCE, OF_A_TENANT


class Slow:
    """Renderings that end when the test lets them."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.let_go = threading.Event()

    def __call__(self) -> str:
        self.started.release()
        assert self.let_go.wait(60)
        return "slow"


async def begun(slow: Slow) -> None:
    assert await asyncio.to_thread(slow.started.acquire, timeout=60)


async def test_another_tenants_chat_is_rendered_meanwhile() -> None:
    turns, slow = TemplateTurns(), Slow()
    chats = [asyncio.create_task(turns.render("a", slow)) for _ in range(AT_ONCE + 1)]
    for _ in range(OF_A_TENANT):
        await begun(slow)
    assert await turns.render("b", lambda: "quick") == "quick"
    assert not any(chat.done() for chat in chats)
    assert not slow.started.acquire(blocking=False), "a leaves a place for others"
    slow.let_go.set()
    assert await asyncio.gather(*chats) == ["slow"] * len(chats)


async def test_a_client_that_leaves_frees_its_turn_and_no_thread_that_is_still_busy() -> None:
    turns, slow = TemplateTurns(), Slow()
    chats = [asyncio.create_task(turns.render("a", slow)) for _ in range(OF_A_TENANT)]
    for _ in range(OF_A_TENANT):
        await begun(slow)
    waiting = asyncio.create_task(turns.render("a", slow))
    await asyncio.sleep(0)
    for task in (waiting, *chats):
        task.cancel()
    left = await asyncio.gather(waiting, *chats, return_exceptions=True)
    assert [type(each) for each in left] == [asyncio.CancelledError] * (1 + len(chats))
    next_chat = asyncio.create_task(turns.render("a", lambda: "next"))
    assert await turns.render("b", lambda: "quick") == "quick"
    assert not next_chat.done(), "the threads of a are busy"
    slow.let_go.set()
    assert await next_chat == "next"


async def test_an_error_is_the_chats_own() -> None:
    turns = TemplateTurns()

    def fail() -> None:
        raise ValueError("the template")

    for _ in range(2 * AT_ONCE):
        with pytest.raises(ValueError, match="the template"):
            await turns.render("a", fail)
    assert await turns.render("a", lambda: 1) == 1
