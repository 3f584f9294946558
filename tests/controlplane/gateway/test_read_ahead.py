"""A variant of a waiting request is read meanwhile: which worker reads it, and how often it is announced."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from controlplane import errors
from controlplane.gateway.engine_client import EngineClient
from controlplane.gateway.read_ahead import AGAIN_S, MAX_REMEMBERED, Announced
from testkit.doors import HEAD, opened, part, report
from testkit.loops import until
from workers import request_headers
from workers.engine.step_observer import StepObserver
from workers.messages import EngineCall, EngineResidency, RankBytes, VariantPlace, VariantRef, WorkerReport
from workers.server.http_server import Door
from workers.server.load_feed import LoadFeed
from workers.tiers import Tier

BASE = EngineCall("/v1/completions", b"{}")
V1, V2 = (VariantRef(f"v{uid}", uid, f"/v{uid}") for uid in (1, 2))


def call(variant: VariantRef) -> EngineCall:
    return EngineCall("/v1/completions", b"{}", variant)


class Worker:
    """A worker with one place, which is held until `may_end`; and the variants that it had to read."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.asked = 0
        self.arrived, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        variant = request_headers.variant_of(scope["headers"])
        if scope["path"] == request_headers.WANTED_PATH:
            assert variant is not None
            self.told.append(variant.uid)
        else:
            self.asked += 1
            self.arrived.set()
            await self.may_end.wait()
        await receive()
        await send(HEAD)
        await send(part(b"{}", more=False))


def client_of(*doors: Door, places: int = 100) -> EngineClient:
    async def find(base: str) -> list[WorkerReport]:
        return [report(door, limit=1) for door in doors]

    return EngineClient(find, places)


async def test_a_worker_hears_of_a_variant_while_the_request_waits() -> None:
    worker = Worker()
    async with opened(worker) as door:
        client = client_of(door)
        first = asyncio.create_task(client.call("b", BASE))
        await worker.arrived.wait()
        waiting = [asyncio.create_task(client.call("b", call(variant))) for variant in (V1, V1, V2)]
        await until(lambda: len(worker.told) == 2)
        assert worker.told == [1, 2]  # once for both of V1
        assert worker.asked == 1
        worker.may_end.set()
        assert [(await task).status for task in (first, *waiting)] == [200] * 4
        assert worker.told == [1, 2]
        client.close()


async def test_a_request_that_need_not_wait_is_not_announced() -> None:
    worker = Worker()
    worker.may_end.set()
    async with opened(worker) as door:
        client = client_of(door)
        await client._workers("b").directory.refresh()
        for _ in range(3):
            await client.call("b", call(V1))
        assert worker.told == []
        client.close()


async def test_a_refused_request_is_not_announced() -> None:
    """Otherwise a refused client could still have variants read, and others evicted from memory."""
    worker = Worker()
    async with opened(worker) as door:
        client = client_of(door, places=1)
        asked = [asyncio.create_task(client.call("b", BASE))]
        await worker.arrived.wait()
        asked.append(asyncio.create_task(client.call("b", BASE)))
        await until(lambda: len(client._bases["b"].queue) == 1)
        with pytest.raises(errors.Overloaded):
            await client.call("b", call(V1))
        assert client._bases["b"]._read_ahead._announcing == set()
        worker.may_end.set()
        await asyncio.gather(*asked)
        assert worker.told == []
        client.close()


async def test_a_request_for_a_base_is_not_announced() -> None:
    worker = Worker()
    async with opened(worker) as door:
        client = client_of(door)
        asked = [asyncio.create_task(client.call("b", BASE)) for _ in range(3)]
        await worker.arrived.wait()
        await until(lambda: len(client._bases["b"].queue) == 2)
        worker.may_end.set()
        await asyncio.gather(*asked)
        assert worker.told == []
        client.close()


async def test_a_variant_that_a_worker_holds_is_not_announced() -> None:
    holder, other = Worker(), Worker()

    async def places() -> EngineResidency:
        held = VariantPlace(1, Tier.HOST, None, (RankBytes(0, 1, 0),))
        return EngineResidency(1, 1, 0, 0, 0, (held,))

    door = Door(holder, LoadFeed(StepObserver(), places))
    await door.open("127.0.0.1", "10.0.0.1")
    async with opened(other) as second:
        client = client_of(door, second)
        workers = client._workers("b")
        await workers.directory.refresh()
        await until(lambda: any(w.load is not None and w.load.variants for w in workers.directory.known))
        asked = [asyncio.create_task(client.call("b", BASE)) for _ in range(2)]
        await holder.arrived.wait()
        await other.arrived.wait()
        waiting = [asyncio.create_task(client.call("b", call(variant))) for variant in (V1, V2)]
        await until(lambda: holder.told or other.told)
        assert holder.told + other.told == [2]
        for worker in (holder, other):
            worker.may_end.set()
        await asyncio.gather(*asked, *waiting)
        client.close()
    await door.close()


async def test_a_worker_without_announcements_costs_no_request() -> None:
    """An older one, which hands the path on to its application."""

    class Older(Worker):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == request_headers.WANTED_PATH:
                self.told.append(0)
                head = {"type": "http.response.start", "status": 404, "headers": []}
                await send(head)
                await send(part(json.dumps({"detail": "Not Found"}).encode(), more=False))
                return
            await super().__call__(scope, receive, send)

    worker = Older()
    async with opened(worker) as door:
        client = client_of(door)
        first = asyncio.create_task(client.call("b", BASE))
        await worker.arrived.wait()
        second = asyncio.create_task(client.call("b", call(V1)))
        await until(lambda: worker.told)
        worker.may_end.set()
        assert [(await task).status for task in (first, second)] == [200, 200]
        client.close()


def test_a_variant_is_announced_again_after_a_while_and_not_remembered_for_ever() -> None:
    wanted = Announced()
    assert wanted.is_due(1, 0.0)
    wanted.note(1, 0.0)
    assert [wanted.is_due(1, at_s) for at_s in (0.0, AGAIN_S - 0.1, AGAIN_S)] == [False, False, True]
    for uid in range(3 * MAX_REMEMBERED):
        wanted.note(uid, 100.0)
        assert len(wanted._announced_s) <= MAX_REMEMBERED
    assert wanted.is_due(0, 100.0)
    assert not wanted.is_due(3 * MAX_REMEMBERED - 1, 100.0)
