"""A worker's load, pushed through its door on a real socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest

from testkit.doors import Held, no_variants
from testkit.engine_configs import echo_config
from workers import load_lines, request_headers
from workers.engine.step_observer import StepObserver
from workers.messages import EngineCall, EngineResidency, VariantPlace, VariantRef, WorkerLoad
from workers.server import load_feed
from workers.server.http_server import Door
from workers.server.load_feed import LoadFeed
from workers.server.worker import Worker
from workers.tiers import Tier

IDLE = WorkerLoad(0, 0, 0, 0.0, 0, 0.0, 0, 0.0)


class Pushing:
    """A door with a feed before an application of the test's."""

    def __init__(self) -> None:
        self.app = Held()
        self.observer = StepObserver()
        self.feed = LoadFeed(self.observer, no_variants)
        self.door = Door(self.app, self.feed)

    @property
    def headers(self) -> dict[str, str]:
        return {request_headers.SECRET: self.door.secret}

    @property
    def url(self) -> str:
        return f"http://{self.door.address}"


@asynccontextmanager
async def pushing() -> AsyncIterator[Pushing]:
    made = Pushing()
    await made.door.open("127.0.0.1", "127.0.0.1")
    try:
        yield made
    finally:
        made.app.may_answer.set()
        await made.door.close()


async def loads(url: str, headers: dict[str, str]) -> AsyncGenerator[WorkerLoad, None]:
    """The loads as a gateway hears them; they end when the worker ends the feed."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
        http.stream("GET", url + load_lines.PATH, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            yield load_lines.load_of(line.encode())


async def first(heard: AsyncGenerator[WorkerLoad, None], **wanted: object) -> WorkerLoad:
    async for load in heard:
        if all(getattr(load, name) == value for name, value in wanted.items()):
            return load
    raise AssertionError("the feed ended")


async def test_the_feed_counts_requests_and_not_its_listeners() -> None:
    async with pushing() as one, aclosing(loads(one.url, one.headers)) as heard:
        assert await anext(heard) == IDLE
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            asking = asyncio.create_task(http.post(one.url, headers=one.headers))
            assert (await first(heard, ongoing=1)).running == 0
            assert one.door.running == 1
            one.app.may_answer.set()
            assert (await asking).status_code == 200
        assert await first(heard, ongoing=0) == IDLE


async def test_only_a_caller_with_the_secret_gets_the_feed() -> None:
    async with pushing() as one, httpx.AsyncClient(trust_env=False) as http:
        for headers in ({}, {request_headers.SECRET: "0" * 64}):
            assert (await http.get(one.url + load_lines.PATH, headers=headers)).status_code == 401


async def test_other_methods_are_the_engines() -> None:
    async with pushing() as one, httpx.AsyncClient(trust_env=False, timeout=60) as http:
        one.app.may_answer.set()
        assert (await http.post(one.url + load_lines.PATH, headers=one.headers)).content == b"late"


async def test_the_engine_s_own_counts_matter_while_it_has_requests() -> None:
    """vLLM says nothing more once the last one was cancelled."""
    async with (
        pushing() as one,
        aclosing(loads(one.url, one.headers)) as heard,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        asking = asyncio.create_task(http.post(one.url, headers=one.headers))
        await one.app.arrived.wait()
        one.observer.requests(1, 2, 0.5)
        assert (await first(heard, running=1, waiting=2)).kv_usage == 0.5
        asking.cancel()
        assert await first(heard, ongoing=0) == IDLE


async def test_each_listener_gets_every_step_once() -> None:
    async with (
        pushing() as one,
        aclosing(loads(one.url, one.headers)) as a,
        aclosing(loads(one.url, one.headers)) as b,
    ):
        await asyncio.gather(anext(a), anext(b))

        async def listen(heard: AsyncGenerator[WorkerLoad, None]) -> tuple[int, float]:
            steps, seconds = 0, 0.0
            while steps < 60:
                load = await anext(heard)
                steps, seconds = steps + load.steps, seconds + load.steps * load.step_s
            return steps, seconds

        listening = asyncio.gather(listen(a), listen(b))
        for _ in range(60):
            one.observer.step([0.02, 0.02])
            await asyncio.sleep(0.002)
        for steps, seconds in await listening:
            assert steps == 60
            assert seconds == pytest.approx(1.2)


async def test_lines_are_no_closer_than_they_may_be() -> None:
    """A busy machine only makes them fewer."""
    async with pushing() as one, aclosing(one.feed.lines()) as lines:
        began_s = time.monotonic()
        for number in range(8):
            await anext(lines)
            assert time.monotonic() - began_s >= number * load_feed.LEAST_S * 0.99
            one.observer.step([0.02])


async def test_an_idle_worker_reports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_feed, "MOST_S", 0.06)
    async with pushing() as one, aclosing(loads(one.url, one.headers)) as heard:
        assert [await anext(heard) for _ in range(4)] == [IDLE] * 4


async def test_closing_the_server_ends_the_feed_and_requests_continue() -> None:
    async with pushing() as one, aclosing(loads(one.url, one.headers)) as heard:
        url = one.url
        await anext(heard)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            asking = asyncio.create_task(http.post(one.url, headers=one.headers))
            await one.app.arrived.wait()
            closing = asyncio.create_task(one.door.close())
            assert all([load.ongoing == 1 async for load in heard])
            assert not closing.done()
            late = await http.get(url + load_lines.PATH, headers=one.headers)
            assert (late.status_code, late.headers[request_headers.REFUSED]) == (503, "1")
            one.app.may_answer.set()
            assert (await asking).content == b"late"
            await closing


async def test_a_listener_that_leaves_leaves_nothing_behind() -> None:
    async with pushing() as one:
        async with aclosing(loads(one.url, one.headers)) as heard:
            await anext(heard)
            assert len(one.feed._listeners) == 1
        while one.feed._listeners:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert one.feed._watching is not None
        await one.feed._watching


async def test_variants_near_the_engine_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_feed, "VARIANTS_EVERY_S", 0.01)
    places = [VariantPlace(9, Tier.HOST, None, ()), VariantPlace(7, Tier.DEVICE, 0, ())]
    async with pushing() as one:

        async def residency() -> EngineResidency:
            disk = VariantPlace(8, Tier.DISK, None, ())
            return EngineResidency(2, 2, 0, 0, 0, (*places, disk))

        one.feed._residency = residency
        async with aclosing(loads(one.url, one.headers)) as heard:
            await first(heard, variants=((7, "device"), (9, "host")))
            places[0] = VariantPlace(9, Tier.DEVICE, 1, ())
            await first(heard, variants=((7, "device"), (9, "device")))

            async def silent() -> EngineResidency:
                raise TimeoutError

            one.feed._residency = silent
            one.observer.step([0.02])
            assert (await first(heard, steps=1)).variants == ((7, "device"), (9, "device"))


async def test_an_echo_engine_reports_its_answers() -> None:
    worker = Worker(echo_config(), "127.0.0.1")
    await worker.start()
    await worker.open_door("127.0.0.1")
    report = await worker.report()
    headers = {request_headers.SECRET: report.secret}
    try:
        async with aclosing(loads(f"http://{report.address}", headers)) as heard:
            assert await anext(heard) == IDLE
            body = b'{"model": "b", "prompt": "a b c d", "stream": true}'
            await worker.call(EngineCall("/v1/completions", body, VariantRef("v", 7, "/a")))
            told = await first(heard, steps=3, prefill_tokens=4)
            assert 0.0 < told.step_s < 60.0
            assert told.prefill_s > 0.0
            assert (told.running, told.waiting) == (0, 0)
            await first(heard, variants=((7, "device"),))
    finally:
        await worker.close()
