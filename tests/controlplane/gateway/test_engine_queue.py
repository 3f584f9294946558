"""Requests that wait at a gateway for workers behind real doors: turns, refusals, lateness, leaving."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from controlplane import errors
from controlplane.gateway import base_workers, worker_directory
from controlplane.gateway.demand_meter import DemandMeter
from controlplane.gateway.engine_client import EngineClient
from controlplane.gateway.queue_metrics import QueueMetrics
from controlplane.state.terms import LatePolicy, Priority
from controlplane.traffic.attainment import Outcome, attained
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.request_terms import RequestTerms
from testkit.doors import HEAD, Held, opened, part, report
from testkit.loops import until
from workers.messages import EngineCall, EngineHead, WorkerReport

ASK = EngineCall("/v1/completions", b"{}")
DROP = RequestTerms(ttft_s=0.05, late=LatePolicy.DROP)


@pytest.fixture(autouse=True)
async def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_directory, "RETRY_S", 0.01)
    monkeypatch.setattr(base_workers, "REFRESH_S", 0.02)


@contextlib.asynccontextmanager
async def serving(app: Any, limit: int = 1, max_queued: int = 10) -> AsyncIterator[EngineClient]:
    """A client of one worker that takes `limit` requests at once."""
    async with opened(app) as door:

        async def find(base: str) -> list[WorkerReport]:
            return [report(door, limit)]

        client = EngineClient(find, max_queued)
        try:
            yield client
        finally:
            client.close()


def call(client: EngineClient, terms: RequestTerms | None = None) -> asyncio.Task[Any]:
    return asyncio.create_task(client.call("b", ASK, terms or RequestTerms()))


def waiting(client: EngineClient) -> int:
    return sum(count for count, _ in client.views()["b"].waiting.values()) if client.views() else 0


def _are_waiting(client: EngineClient, count: int) -> bool:
    return waiting(client) == count


async def held_and_waiting(client: EngineClient, app: Held, *terms: RequestTerms) -> list[asyncio.Task[Any]]:
    """One request is at the worker, and these wait, in this order."""
    tasks = [call(client)]
    await app.arrived.wait()
    for number, one in enumerate(terms, 1):
        tasks.append(call(client, one))
        await until(partial(_are_waiting, client, number))
    return tasks


class InTurn:
    """Answers one request at a time, on demand, and remembers the requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.next = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await self.next.acquire()
        await send(HEAD)
        await send(part(b"done", more=False))


async def test_the_line_holds_what_the_worker_does_not_take_and_orders_it() -> None:
    app = InTurn()
    async with serving(app) as client:
        tasks = []
        for name, priority in (
            (b"first", "normal"),
            (b"low", "low"),
            (b"normal", "normal"),
            (b"high", "high"),
        ):
            request = EngineCall("/v1/completions", name)
            terms = RequestTerms(priority=Priority(priority))
            tasks.append(asyncio.create_task(client.call("b", request, terms)))
            await until(lambda: len(app.bodies) + waiting(client) == len(tasks))
        assert app.bodies == [b"first"], "the engine must not hold what can still be ordered"
        for _ in tasks:
            app.next.release()
        await asyncio.gather(*tasks)
        assert app.bodies == [b"first", b"high", b"normal", b"low"]


async def test_a_full_line_refuses_with_a_time_to_retry() -> None:
    app = Held()
    async with serving(app, max_queued=1) as client:
        tasks = await held_and_waiting(client, app, RequestTerms())
        with pytest.raises(errors.Overloaded) as refusal:
            await call(client)
        assert refusal.value.retry_after_s
        assert refusal.value.details == {"reason": "full_line"}
        high = call(client, RequestTerms(priority=Priority.HIGH))
        with pytest.raises(errors.Overloaded) as refusal:
            await tasks[1]
        assert refusal.value.details == {"reason": "displaced"}
        app.may_answer.set()
        assert (await high).status == 200


@pytest.mark.parametrize("streams", [False, True])
async def test_a_late_request_is_dropped_while_it_waits(streams: bool) -> None:
    app = Held()
    async with serving(app) as client:
        tasks = await held_and_waiting(client, app)
        late = anext(client.stream("b", ASK, DROP)) if streams else client.call("b", ASK, DROP)
        with pytest.raises(errors.Late) as error:
            await late
        assert error.value.details == {"reason": "late"}
        assert waiting(client) == 0
        app.may_answer.set()
        assert (await tasks[0]).status == 200
        assert app.asked == 1


async def test_a_late_request_that_is_to_be_finished_is() -> None:
    app = Held()
    async with serving(app) as client:
        tasks = await held_and_waiting(client, app, RequestTerms(ttft_s=0.001, deadline_s=0.001))
        await asyncio.sleep(0.01)
        app.may_answer.set()
        assert [(await task).body for task in tasks] == [b"late", b"late"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_late_request_is_dropped_at_the_engine_too(streams: bool) -> None:
    """A stream is late by its TTFT; a whole answer, whose first token no client sees, by its deadline."""
    app = Held()
    async with serving(app) as client:
        if streams:
            with pytest.raises(errors.Late):
                await anext(client.stream("b", ASK, DROP))
        else:
            assert DROP.ttft_s
            patient = call(client, DROP)
            await app.arrived.wait()
            await asyncio.sleep(2 * DROP.ttft_s)
            assert not patient.done()
            app.may_answer.set()
            assert (await patient).status == 200
            app.may_answer.clear()
            with pytest.raises(errors.Late):
                await call(client, RequestTerms(deadline_s=0.05, late=LatePolicy.DROP))
        await app.left.wait()  # the engine's request is cancelled
        app.may_answer.set()
        assert (await call(client)).status == 200


async def test_a_stream_ends_at_its_deadline() -> None:
    app = Held(streams=True)
    async with serving(app) as client:
        terms = RequestTerms(deadline_s=0.2, late=LatePolicy.DROP)
        items = client.stream("b", ASK, terms)
        assert [await anext(items), await anext(items)] == [
            EngineHead(200, "text/event-stream"),
            b"data: 1\n\n",
        ]
        with pytest.raises(errors.Late):
            await anext(items)
        await app.left.wait()


async def test_a_waiting_request_whose_client_leaves_is_forgotten() -> None:
    app = Held()
    async with serving(app) as client:
        tasks = await held_and_waiting(client, app, RequestTerms(), RequestTerms())
        tasks[1].cancel()
        await until(lambda: waiting(client) == 1)
        app.may_answer.set()
        assert [(await task).status for task in (tasks[0], tasks[2])] == [200, 200]
        assert app.asked == 2
        await until(lambda: client._bases["b"].demand.in_flight == 0)


async def test_a_request_that_waits_for_a_dead_worker_goes_to_the_next_worker() -> None:
    async with opened(Held()) as door:
        dead = report(door, 1)
    app = Held()
    async with opened(app) as door:
        reports = [dead]

        async def find(base: str) -> list[WorkerReport]:
            return list(reports)

        client = EngineClient(find, 10)
        tasks = [call(client) for _ in range(4)]
        await until(lambda: client.views() and not client._bases["b"].directory.known)
        reports[:] = [report(door, 1)]
        app.may_answer.set()
        assert [(await task).status for task in tasks] == [200] * 4
        client.close()


async def test_answers_report_their_numbers_of_tokens() -> None:
    """The number of tokens by the engine's usage, or by its events: one event has the reason of the end, and
    one ends the stream."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send(HEAD)
        if body == b"whole":
            await send(part(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 17}}', more=False))
            return
        for _ in range(5):
            await send(part(b'data: {"choices": [{"text": "a"}]}\n\n'))
        await send(part(b'data: {"choices": [{"finish_reason": "stop"}]}\n\n'))
        await send(part(b"data: [DONE]\n\n", more=False))

    async with serving(app) as client:
        await client.call("b", EngineCall("/v1/completions", b"whole"))
        lengths = client._bases["b"].router._history._lengths
        assert lengths.expected(0, 0) == 17
        async for _ in client.stream("b", ASK):
            pass
        assert lengths.expected(0, 0) == (17 + 5) / 2


async def test_waiting_requests_show_in_metrics() -> None:
    app = Held()
    async with serving(app) as client:
        low = RequestTerms(priority=Priority.LOW)
        tasks = await held_and_waiting(client, app, low, low)
        samples = {
            (s.name, s.labels["priority"]): s.value
            for family in QueueMetrics(client.views).collect()
            for s in family.samples
        }
        assert samples["ostinato_line_requests", "low"] == 2
        assert samples["ostinato_line_requests", "high"] == 0
        assert samples["ostinato_line_longest_wait_seconds", "low"] > 0
        app.may_answer.set()
        await asyncio.gather(*tasks)


async def test_refused_requests_count_as_demand_for_a_while_and_not_without_bound() -> None:
    demand, request = DemandMeter(asyncio.get_running_loop().time, 3), InferenceRequest()
    for _ in range(64):
        demand.answered(0.001)
    demand.average()
    for _ in range(9):
        demand.begin(request)
        demand.end(request, refused=True)
    assert demand.now == 3
    await until(lambda: demand.now == 0)


@pytest.mark.parametrize(
    ("seen", "kept"),
    [
        (Outcome("ok", True, 0.5, 2.0, 11), {"ttft": True, "tpot": True, "deadline": True}),
        (Outcome("ok", True, 1.5, 9.0, 11), {"ttft": False, "tpot": False, "deadline": False}),
        (Outcome("ok", False, None, 2.0, 0), {"deadline": True}),
        (Outcome("overloaded", True, None, 0.1, 0), {"ttft": False, "deadline": False}),
        (Outcome("late", True, 0.5, 5.0, 3), {"ttft": True, "deadline": False}),
        (Outcome("client_disconnected", True, 0.5, 5.0, 3), {}),
        (Outcome("invalid_request", True, None, 0.1, 0), {}),
    ],
)
def test_kept_targets_are_counted(seen: Outcome, kept: dict[str, bool]) -> None:
    assert dict(attained(RequestTerms(ttft_s=1.0, tpot_s=0.2, deadline_s=4.0), seen)) == kept
    assert dict(attained(RequestTerms(), seen)) == {}
