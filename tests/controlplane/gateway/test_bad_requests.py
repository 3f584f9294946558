"""Requests that an engine answers with a 500 take the engine from no other client; a failing engine is left
out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.gateway import base_workers, engine_limits, health_watch
from controlplane.gateway.engine_client import EngineClient
from controlplane.traffic.worker_health import HealthRules, Takes
from testkit.doors import opened, part, report
from testkit.loops import until
from workers import request_headers
from workers.messages import EngineCall, VariantRef, WorkerReport

BAD = EngineCall("/v1/completions", b'{"prompt": "bad"}')
ODD = EngineCall("/v1/completions", b'{"prompt": "odd"}')
GOOD = EngineCall("/v1/completions", b'{"prompt": "good"}')
CLIENTS = ("bad", "odd", "good")
FAILURES = HealthRules().failures
FAULT = request_headers.FAULT.encode()


def of_variant(uid: int) -> EngineCall:
    return EngineCall(GOOD.path, GOOD.body, VariantRef(f"v{uid}", uid, f"/v{uid}"))


class Engine:
    """Fails at what is bad, does not understand what is odd; at everything while it is `ill` or `confused`.
    Variants are not loaded while it is `torn`. A harmless request waits for `may_tell`."""

    def __init__(self) -> None:
        self.ill = self.confused = self.torn = False
        self.asked: list[dict[str, Any]] = []
        self.may_tell = asyncio.Event()
        self.may_tell.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.asked.append(body)
        if body["prompt"] not in CLIENTS:
            await self.may_tell.wait()
        status, headers = self._answer(body["prompt"], request_headers.variant_of(scope["headers"]))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(part(b"{}", more=False))

    def _answer(self, prompt: str, variant: VariantRef | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        if variant is not None and self.torn:
            return 500, [(FAULT, request_headers.OF_LOADING)]
        if self.ill or prompt == "bad":
            return 500, []
        if self.confused or prompt == "odd":
            return 400, [(FAULT, request_headers.OF_UNDERSTANDING)]
        return 200, []

    @property
    def harmless(self) -> list[dict[str, Any]]:
        return [body for body in self.asked if body["prompt"] not in CLIENTS]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base_workers, health_watch, engine_limits):
        monkeypatch.setattr(module, "LOOK_S", 0.02)


@pytest.fixture
async def two() -> AsyncIterator[tuple[EngineClient, list[Engine]]]:
    engines = [Engine(), Engine()]
    async with opened(engines[0]) as first, opened(engines[1]) as second:

        async def find(base: str) -> list[WorkerReport]:
            return [report(first), report(second)]

        client = EngineClient(find, 100)
        await client._workers("b").directory.refresh()
        yield client, engines
        client.close()


def takes(client: EngineClient) -> list[Takes]:
    return [worker.takes for worker in client._bases["b"].directory.known]


async def held_up(client: EngineClient, engines: list[Engine]) -> None:
    """Bad requests until each engine has a harmless one, which waits for `may_tell`."""
    for engine in engines:
        engine.may_tell.clear()
    while not all(engine.harmless for engine in engines):
        await client.call("b", BAD)
        await asyncio.sleep(0)


@pytest.mark.parametrize(("bad", "status"), [(BAD, 500), (ODD, 400)])
async def test_a_client_with_bad_requests_takes_no_engine_from_others(
    two: tuple[EngineClient, list[Engine]], bad: EngineCall, status: int
) -> None:
    client, engines = two
    for _ in range(20 * FAILURES):
        assert (await client.call("b", bad)).status == status
        assert takes(client) == [Takes.ALL, Takes.ALL]
    await until(lambda: not any(worker.is_probed for worker in client._bases["b"].directory.known))
    assert takes(client) == [Takes.ALL, Takes.ALL]
    assert (await client.call("b", GOOD)).status == 200
    for engine in engines:
        failed = sum(body["prompt"] in ("bad", "odd") for body in engine.asked)
        assert 1 <= len(engine.harmless) <= failed // FAILURES  # one for as many bad ones, and not more
        assert {body["model"] for body in engine.harmless} == {"b"}
        assert {body["max_tokens"] for body in engine.harmless} == {1}


@pytest.mark.parametrize("how", ["ill", "confused"])
async def test_an_engine_that_fails_every_request_gets_none_until_it_answers(
    two: tuple[EngineClient, list[Engine]], how: str
) -> None:
    client, engines = two
    setattr(engines[0], how, True)
    while takes(client)[0] is not Takes.NONE:
        await client.call("b", GOOD)
        await asyncio.sleep(0)
    assert takes(client)[1] is Takes.ALL
    setattr(engines[0], how, False)
    while takes(client) != [Takes.ALL, Takes.ALL]:
        assert (await client.call("b", GOOD)).status == 200
        await asyncio.sleep(0.005)


async def test_a_late_probe_says_nothing_where_other_requests_were_answered(
    two: tuple[EngineClient, list[Engine]],
) -> None:
    client, engines = two
    await held_up(client, engines)
    while not all(worker.good for worker in client._bases["b"].directory.known):
        await client.call("b", GOOD)
    for engine in engines:
        engine.ill = True
        engine.may_tell.set()
    await until(lambda: not any(worker.is_probed for worker in client._bases["b"].directory.known))
    assert takes(client) == [Takes.ALL, Takes.ALL]


async def test_an_engine_that_fails_to_load_all_variants_gets_none_and_one_failure_says_nothing(
    two: tuple[EngineClient, list[Engine]],
) -> None:
    client, engines = two
    engines[0].torn = True
    for _ in range(8 * FAILURES):  # its disk may be gone
        await client.call("b", of_variant(1))
    assert takes(client) == [Takes.ALL, Takes.ALL]
    while takes(client)[0] is not Takes.NONE:
        for uid in (1, 2):
            await client.call("b", of_variant(uid))
    assert takes(client)[1] is Takes.ALL
    assert engines[0].harmless == []


async def test_a_harmless_request_is_no_demand(two: tuple[EngineClient, list[Engine]]) -> None:
    client, engines = two
    await held_up(client, engines)
    client.demand()
    await asyncio.sleep(0.02)
    assert client.demand() == {}  # though one is under way
    for engine in engines:
        engine.may_tell.set()
    await until(lambda: not any(worker.outstanding for worker in client._bases["b"].directory.known))
