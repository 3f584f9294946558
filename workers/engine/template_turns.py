"""The chats of one application that are rendered at the same time, each in a thread with a process.

vLLM has one thread for the chats of an application, and for its tokenizer. A template may take CPU_S of
`template_process` for a chat; meanwhile all other requests of the application would wait. Here up to AT_ONCE
chats are rendered at the same time, and each tenant leaves a place for others (`tenant_queue`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

from workers.cache_salt import tenant_of
from workers.engine.tenant_queue import AT_ONCE, TenantQueue
from workers.patches.vllm import chat_rendering


def take_turns(renderer: Any) -> None:
    """Make the chats of this renderer of vLLM, which is one application's, take turns."""
    turns = TemplateTurns()

    async def render(salt: str | None, apply: Callable[[], Any]) -> Any:
        return await turns.render(tenant_of(salt), apply)

    chat_rendering.install(renderer, render)


class TemplateTurns:
    """The turns of one application's chats, in its server's event loop."""

    def __init__(self) -> None:
        self._queue = TenantQueue()
        self._turns: dict[bytes, asyncio.Future[None]] = {}
        self._threads = ThreadPoolExecutor(AT_ONCE, "chat-template")
        self._numbers = count()

    async def render(self, tenant: str, render: Callable[[], Any]) -> Any:
        """The result of `render()`, once it is the tenant's turn."""
        loop, job = asyncio.get_running_loop(), b"%d" % next(self._numbers)
        await self._turn(job, tenant)
        rendering = self._threads.submit(render)
        # A thread is busy until its process has ended, also if the client has left.
        rendering.add_done_callback(lambda _: _call(loop, self._end, job))
        return await asyncio.wrap_future(rendering)

    async def _turn(self, job: bytes, tenant: str) -> None:
        turn = self._turns[job] = asyncio.get_running_loop().create_future()
        self._queue.join(job, tenant)
        self._begin()
        try:
            await turn
        except BaseException:  # the client has left
            if not self._queue.leave(job, tenant):
                self._end(job)
            raise
        finally:
            del self._turns[job]

    def _begin(self) -> None:
        while (job := self._queue.begin()) is not None:
            if not self._turns[job].done():
                self._turns[job].set_result(None)

    def _end(self, job: bytes) -> None:
        self._queue.end(job)
        self._begin()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[bytes], None], job: bytes) -> None:
    with suppress(RuntimeError):  # the server has ended
        loop.call_soon_threadsafe(function, job)
