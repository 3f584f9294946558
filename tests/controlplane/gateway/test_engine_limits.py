"""Engines that say nothing for too long, before real doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controlplane import errors
from controlplane.gateway.engine_client import EngineClient
from controlplane.gateway.engine_limits import EngineLimits
from testkit.doors import HEAD, Held, opened, part, report
from workers.asgi import AsgiApp
from workers.messages import EngineCall, EngineHead, WorkerReport

ASK = EngineCall("/v1/completions", b"{}")
FOREVER = 3600.0


@asynccontextmanager
async def client_before(app: AsgiApp, first_s: float, next_s: float) -> AsyncIterator[EngineClient]:
    async with opened(app) as door:

        async def find(base: str) -> list[WorkerReport]:
            return [report(door)]

        client = EngineClient(find, 10, limits=EngineLimits(first_s, next_s))
        yield client
        client.close()


async def no_piece(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send(HEAD)
    await receive()  # until its client leaves


async def test_an_engine_that_does_not_begin_is_given_up() -> None:
    app = Held()
    async with client_before(app, 0.2, FOREVER) as client:
        with pytest.raises(errors.Cut, match="begun to answer") as caught:
            await anext(client.stream("b", ASK))
        assert (caught.value.status, caught.value.code) == (504, "cut")
        await app.left.wait()  # its request is aborted


async def test_a_head_is_no_beginning() -> None:
    async with client_before(no_piece, 0.2, FOREVER) as client:
        items = client.stream("b", ASK)
        assert isinstance(await anext(items), EngineHead)
        with pytest.raises(errors.Cut, match="not begun"):
            await anext(items)


async def test_an_engine_that_does_not_go_on_is_given_up() -> None:
    app = Held(streams=True)
    async with client_before(app, FOREVER, 0.2) as client:
        items = client.stream("b", ASK)
        assert [await anext(items), await anext(items)] == [
            EngineHead(200, "text/event-stream"),
            b"data: 1\n\n",
        ]
        with pytest.raises(errors.Cut, match="continued its answer"):
            await anext(items)
        await app.left.wait()


async def test_a_client_that_takes_its_time_is_no_silent_engine() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(HEAD)
        await send(part(b"one"))
        await send(part(b"two"))
        await send(part(b"three", more=False))

    async with client_before(app, FOREVER, 0.3) as client:
        got = []
        async for item in client.stream("b", ASK):
            got.append(item)
            await asyncio.sleep(0.4)
        assert got[1:] == [b"one", b"two", b"three"]


async def test_whole_answers_have_no_limit_for_the_first_byte() -> None:
    app = Held()
    async with client_before(app, 0.05, 0.05) as client:
        asking = asyncio.create_task(client.call("b", ASK))
        await app.arrived.wait()
        await asyncio.sleep(0.3)
        app.may_answer.set()
        assert (await asking).body == b"late"
