"""Requests that an engine answers with a 500 take it from nobody; an engine that fails is left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from doors import opened, part, report

from controlplane.gateway import engine_limits, worker_pool
from controlplane.gateway.engine_client import EngineClient
from controlplane.traffic.worker_health import HealthRules, Takes
from workers.messages import EngineCall, WorkerReport

BAD = EngineCall("/v1/completions", b'{"prompt": "bad"}')
GOOD = EngineCall("/v1/completions", b'{"prompt": "good"}')
FAILURES = HealthRules().failures


class Engine:
    """Fails at what is bad; at everything while it is `ill`."""

    def __init__(self) -> None:
        self.ill = False
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.asked.append(body)
        status = 500 if self.ill or body["prompt"] == "bad" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send(part(b"{}", more=False))

    @property
    def harmless(self) -> list[dict[str, Any]]:
        return [body for body in self.asked if body["prompt"] not in ("bad", "good")]


@pytest.fixture(autouse=True)
async def _quick(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    for module in (worker_pool, engine_limits):
        monkeypatch.setattr(module, "LOOK_S", 0.02)
    async with asyncio.timeout(90):
        yield


@pytest.fixture
async def two() -> AsyncIterator[tuple[EngineClient, list[Engine]]]:
    engines = [Engine(), Engine()]
    async with opened(engines[0]) as first, opened(engines[1]) as second:

        async def find(host: str) -> list[WorkerReport]:
            return [report(first), report(second)]

        client = EngineClient(find, 100)
        await client._workers("b").refresh()
        yield client, engines
        client.close()


def takes(client: EngineClient) -> list[Takes]:
    return [worker.takes for worker in client._hosts["b"]._known]


async def until(check: Any) -> None:
    while not check():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def test_whoever_sends_bad_requests_takes_no_engine_from_others(
    two: tuple[EngineClient, list[Engine]],
) -> None:
    client, engines = two
    for _ in range(20 * FAILURES):
        assert (await client.call("b", BAD)).status == 500
        assert takes(client) == [Takes.ALL, Takes.ALL]
    await until(lambda: not any(worker.is_asked for worker in client._hosts["b"]._known))
    assert takes(client) == [Takes.ALL, Takes.ALL]
    assert (await client.call("b", GOOD)).status == 200
    for engine in engines:
        bad = sum(body["prompt"] == "bad" for body in engine.asked)
        assert 1 <= len(engine.harmless) <= bad // FAILURES  # one for as many bad ones, and not more
        assert {body["model"] for body in engine.harmless} == {"b"}
        assert {body["max_tokens"] for body in engine.harmless} == {1}


async def test_an_engine_that_fails_gets_no_more_until_it_answers(
    two: tuple[EngineClient, list[Engine]],
) -> None:
    client, engines = two
    engines[0].ill = True
    while takes(client)[0] is not Takes.NONE:
        await client.call("b", GOOD)
        await asyncio.sleep(0)
    assert takes(client)[1] is Takes.ALL
    engines[0].ill = False
    while takes(client) != [Takes.ALL, Takes.ALL]:
        assert (await client.call("b", GOOD)).status == 200
        await asyncio.sleep(0.005)


async def test_demand_is_what_clients_ask(two: tuple[EngineClient, list[Engine]]) -> None:
    client, engines = two
    for _ in range(2 * FAILURES):
        await client.call("b", BAD)
    await until(lambda: any(engine.harmless for engine in engines))
    assert client._hosts["b"]._in_flight == 0
    await until(lambda: not any(worker.outstanding for worker in client._hosts["b"]._known))
