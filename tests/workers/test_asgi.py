"""Calling an ASGI application in-process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from workers import asgi
from workers.messages import EngineCall, EngineHead, EngineReply

START = {"type": "http.response.start", "status": 201, "headers": [(b"Content-Type", b"text/x")]}

X, ROOT = EngineCall("/x", b"body"), EngineCall("/", b"")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "GRACE_S", 0.02)


def part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send(START)
    await send(part(scope["path"].encode()))
    await send(part(b""))
    await send(part(message["body"]))


async def test_a_whole_reply_is_read() -> None:
    assert await asgi.call(echo, X) == EngineReply(201, "text/x", b"/xbody")


async def test_a_stream_begins_with_its_head_and_has_no_empty_chunks() -> None:
    async with aclosing(asgi.stream(echo, X)) as items:
        assert [i async for i in items] == [EngineHead(201, "text/x"), b"/x", b"body"]


async def test_chunks_come_as_they_are_sent() -> None:
    more = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(part(b"first"))
        await more.wait()
        await send(part(b"second"))

    async with aclosing(asgi.stream(app, ROOT)) as items:
        await anext(items)
        assert await anext(items) == b"first"
        more.set()
        assert await anext(items) == b"second"


async def test_an_exception_is_raised_after_what_was_sent() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asgi.call(app, ROOT)
    async with aclosing(asgi.stream(app, ROOT)) as items:
        assert await anext(items) == EngineHead(201, "text/x")
        with pytest.raises(ZeroDivisionError):
            await anext(items)


async def test_an_application_without_an_answer_is_a_500() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    assert (await asgi.call(app, ROOT)).status == 500


@pytest.mark.parametrize("chunks", [1, 1000], ids=["waiting", "blocked on a full queue"])
async def test_closing_ends_the_application(chunks: int) -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send(START)
            for _ in range(chunks):
                await send(part(b"x"))
            await asyncio.Event().wait()
        finally:
            ended.set()

    items = asgi.stream(app, ROOT)
    await anext(items)
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await items.aclose()
        await ended.wait()


async def test_an_application_that_never_stops_sending_is_ended() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        while True:
            await send(part(b"x"))

    items = asgi.stream(app, ROOT)
    await anext(items)
    async with asyncio.timeout(60):
        await items.aclose()


async def test_an_application_has_a_moment_to_act_on_the_disconnect() -> None:
    acted = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0.001)
        acted.set()

    items = asgi.stream(app, ROOT)
    await anext(items)
    await items.aclose()
    assert acted.is_set()


@pytest.mark.parametrize("over_and_over", [False, True])
async def test_cancelling_the_consumer_ends_the_application(over_and_over: bool) -> None:
    """Over and over, as anyio's cancel scopes do it, and so Starlette when a client leaves."""
    ended, started = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(asgi.call(app, ROOT))
    await started.wait()
    call.cancel()
    while over_and_over and not call.done():
        call.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(60):
        await ended.wait()


async def test_an_application_that_ends_on_disconnect_receives_it() -> None:
    told = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        try:
            assert (await receive())["type"] == "http.disconnect"
        finally:
            told.set()

    items = asgi.stream(app, ROOT)
    await anext(items)
    async with asyncio.timeout(60):
        await items.aclose()
        await told.wait()
