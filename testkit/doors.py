"""Workers' doors on real sockets, before applications of a test's choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from workers.asgi import AsgiApp
from workers.engine.step_observer import StepObserver
from workers.messages import EngineResidency, WorkerReport
from workers.server.http_server import Door
from workers.server.load_feed import LoadFeed

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def no_variants() -> EngineResidency:
    return EngineResidency(0, 0, 0, 0, 0, ())


@asynccontextmanager
async def opened(app: AsgiApp, tells: bool = True) -> AsyncIterator[Door]:
    """A worker that does not report its load is an older one: the application is asked for it."""
    door = Door(app, LoadFeed(StepObserver(), no_variants) if tells else None)
    await door.open("127.0.0.1", "10.0.0.1")
    try:
        yield door
    finally:
        await door.close()


def report(door: Door, limit: int = 4) -> WorkerReport:
    return WorkerReport(
        1,
        "node",
        (),
        "test",
        address=door.address,
        secret=door.secret,
        max_ongoing_requests=limit,
        proof=door.proof,
    )


class Held:
    """An application that answers on permission, and reports the clients that left before."""

    def __init__(self, streams: bool = False) -> None:
        self.streams = streams
        self.asked = 0
        self.arrived = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        await receive()
        if self.streams:
            await send(HEAD)
            await send(part(b"data: 1\n\n"))
        self.arrived.set()
        gone, free = asyncio.ensure_future(receive()), asyncio.ensure_future(self.may_answer.wait())
        await asyncio.wait({gone, free}, return_when=asyncio.FIRST_COMPLETED)
        free.cancel()
        if gone.done():
            assert gone.result()["type"] == "http.disconnect"
            self.left.set()
            return
        gone.cancel()
        if not self.streams:
            await send(HEAD)
        await send(part(b"late", more=False))
