"""A worker's load, pushed to each listening gateway: a line after each change.

Lines are at least LEAST_S apart, and at most MOST_S. Gateways decide by these lines, so they must be recent:
gateways do not poll, and no line waits in a queue. A gateway that reads slowly gets fewer lines, each with
all changes since the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from workers.engine.step_observer import StepObserver, Sums
from workers.load_lines import CONTENT_TYPE, line_of
from workers.messages import EngineResidency, WorkerLoad
from workers.tiers import Tier

log = logging.getLogger(__name__)

LEAST_S = 0.05
MOST_S = 1.0
# The interval at which the scheduler is asked for the variants' places (`workers.engine.residency_cache`).
VARIANTS_EVERY_S = 0.5

Variants = tuple[tuple[int, str], ...]


class LoadFeed:
    """The load feed of one worker. `observer` is its engine's; `residency` has the places of its variants."""

    def __init__(self, observer: StepObserver, residency: Callable[[], Awaitable[EngineResidency]]) -> None:
        self._observer = observer
        self._residency = residency
        self._ongoing = 0
        self._variants: Variants = ()
        self._held: frozenset[int] = frozenset()
        self._listeners: set[asyncio.Event] = set()
        self._closed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        observer.changed = self._tell

    def lacks(self, uid: int) -> bool:
        """Whether the variant was on disk at the scheduler's last answer.

        False without listeners, since the scheduler is then not asked.
        """
        return bool(self._listeners) and uid not in self._held

    def count(self, ongoing: int) -> None:
        """Set the number of requests at the HTTP server."""
        self._ongoing = ongoing
        self._tell()

    def close(self) -> None:
        """End every answer at once."""
        self._closed.set()
        self._tell()

    def load(self, before: Sums, now: Sums) -> WorkerLoad:
        """The current load, and the steps between the two sums.

        After the last request was cancelled vLLM reports nothing more: without requests, it runs none.
        """
        steps, busy = now.steps - before.steps, self._ongoing > 0
        return WorkerLoad(
            ongoing=self._ongoing,
            running=self._observer.running if busy else 0,
            waiting=self._observer.waiting if busy else 0,
            kv_usage=self._observer.kv_usage if busy else 0.0,
            steps=steps,
            step_s=(now.decode_s - before.decode_s) / steps if steps else 0.0,
            prefill_tokens=now.prefill_tokens - before.prefill_tokens,
            prefill_s=now.prefill_s - before.prefill_s,
            variants=self._variants,
        )

    async def answer(self, receive: Any, send: Any) -> None:
        """Answer one gateway, by ASGI, until it leaves or the feed is closed."""
        head = [(b"content-type", CONTENT_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        tasks = asyncio.create_task(self._send(send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, send: Any) -> None:
        async with aclosing(self.lines()) as lines:
            async for line in lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The lines as they become due, until the feed is closed."""
        changed = asyncio.Event()
        self._listeners.add(changed)
        self._watch_variants()
        told = self._observer.sums
        try:
            while not self._closed.is_set():
                changed.clear()
                now = self._observer.sums
                yield line_of(self.load(told, now))
                told = now
                await _within(LEAST_S, self._closed)
                await _within(MOST_S - LEAST_S, changed)
        finally:
            self._listeners.discard(changed)

    def _tell(self) -> None:
        for changed in self._listeners:
            changed.set()

    def _watch_variants(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._keep_variants())

    async def _keep_variants(self) -> None:
        """Ask for the places while there are listeners. A scheduler without an answer delays no line: the
        last places stay.
        """
        while self._listeners and not self._closed.is_set():
            try:
                found = _places(await self._residency())
            except Exception as e:  # TimeoutError and other errors of the engine's core
                log.info("the scheduler does not report the places of variants: %r", e)
            else:
                if found != self._variants:
                    self._variants, self._held = found, frozenset(uid for uid, _ in found)
                    self._tell()
            await _within(VARIANTS_EVERY_S, self._closed)


def _places(seen: EngineResidency) -> Variants:
    return tuple(sorted((v.uid, str(v.tier)) for v in seen.variants if v.tier is not Tier.DISK))


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for the event, at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        """The request has no body."""
