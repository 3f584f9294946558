"""An engine's account of its variants: read, shared, exported as metrics, and obeyed where it is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from testkit.engine_configs import echo_config
from workers import asgi, request_headers
from workers.engine.residency_cache import ResidencyWatch, residency_of
from workers.engine.variant_metrics import VariantCollector
from workers.messages import (
    EngineCall,
    EngineResidency,
    RankBytes,
    VariantPlace,
    VariantRef,
)
from workers.scheduling.residency import Residency
from workers.server.worker import Worker
from workers.tiers import Tier

CONFIG = echo_config(2, 80, 800)
SEEN = EngineResidency(
    slots=2,
    limit=1,
    skips=3,
    preemptions=4,
    blocked=5,
    variants=(
        VariantPlace(7, Tier.DEVICE, 0, (RankBytes(0, 10, 11), RankBytes(1, 20, 21))),
        VariantPlace(8, Tier.HOST, None, (RankBytes(0, 30, 0), RankBytes(1, 40, 0)), "not in a slot"),
    ),
)


def test_the_schedulers_account_becomes_messages() -> None:
    scheduler = Residency(slots=2, ranks=2)
    scheduler.load(7, "/a", frozenset())
    host = {"7": 10, "8": 30}
    for rank in (0, 1):
        told = {"did": "placed", "uid": 7, "slot": 0, "bytes": 11 + rank, "host": host}
        scheduler.reported(rank, told)
    scheduler.prepare(8, "/b")
    scheduler.prepare(9, "/c")
    counts = {"slots": 2, "limit": 1, "skips": 3, "preemptions": 4, "blocked": 5}
    found = residency_of({**counts, "variants": _over_json(scheduler.snapshot())})
    assert found.variants[0] == VariantPlace(7, Tier.DEVICE, 0, (RankBytes(0, 10, 11), RankBytes(1, 10, 12)))
    waits = "not in a slot; the next request loads it into a slot"
    assert found.variants[1] == VariantPlace(
        8, Tier.HOST, None, (RankBytes(0, 30, 0), RankBytes(1, 30, 0)), waits
    )
    assert (found.variants[2].tier, found.variants[2].ranks) == (Tier.DISK, ())
    assert (found.slots, found.limit, found.skips, found.preemptions, found.blocked) == (2, 1, 3, 4, 5)


def test_host_memory_of_a_slot_is_reported_and_is_no_copy_to_place() -> None:
    scheduler = Residency(slots=1, ranks=2)
    scheduler.load(7, "/a", frozenset())
    for rank, staying in ((0, {"7": 3}), (1, {})):
        held = {"host": {"7": 10} if rank else {}, "staying": staying}
        scheduler.reported(rank, {"did": "placed", "uid": 7, "slot": 0, "bytes": 11, **held})
    (described,) = _over_json(scheduler.snapshot())
    counts = {"slots": 1, "limit": 1, "skips": 0, "preemptions": 0, "blocked": 0}
    (place,) = residency_of({**counts, "variants": [described]}).variants
    assert place == VariantPlace(7, Tier.DEVICE, 0, (RankBytes(0, 3, 11), RankBytes(1, 10, 11)))
    assert described["host_bytes"] == {"1": 10}
    assert not scheduler._in_host(7)
    scheduler.reported(0, {"did": "failed", "uid": 7, "slot": 0, "error": "lost", "fault": "", "host": {}})
    scheduler.give_up(())
    assert scheduler.snapshot()[0]["staying_bytes"] == {}


def _over_json(value: Any) -> Any:
    import json

    return json.loads(json.dumps(value))


async def test_simultaneous_questions_share_an_answer() -> None:
    now, asked = 0.0, 0

    async def ask() -> EngineResidency:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return SEEN

    watch = ResidencyWatch(ask, clock=lambda: now)
    await asyncio.gather(*(watch.get() for _ in range(5)))
    await watch.get()
    assert asked == 1
    now = 1.0
    await watch.get()
    assert asked == 2
    watch.forget()
    await watch.get()
    assert asked == 3


async def test_a_failure_is_not_kept() -> None:
    answers: list[TimeoutError | EngineResidency] = [TimeoutError("busy"), SEEN]

    async def ask() -> EngineResidency:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = ResidencyWatch(ask)
    with pytest.raises(TimeoutError):
        await watch.get()
    assert await watch.get() == SEEN


def test_metrics_by_tier_and_rank() -> None:
    registry = CollectorRegistry()
    registry.register(VariantCollector(lambda: SEEN, CONFIG))
    value = registry.get_sample_value
    assert [value("ostinato_variants", {"tier": t}) for t in Tier] == [1, 1, 0]
    assert value("ostinato_variant_slots") == 2
    assert value("ostinato_variant_limit") == 1
    assert value("ostinato_variant_blocked_requests") == 5
    assert value("ostinato_variant_skips_total") == 3
    assert value("ostinato_variant_preemptions_total") == 4
    assert value("ostinato_variant_bytes", {"tier": "device", "rank": "1"}) == 21
    assert value("ostinato_variant_bytes", {"tier": "host", "rank": "0"}) == 40
    assert value("ostinato_variant_capacity_bytes", {"tier": "host", "rank": "1"}) == 800


def test_an_engine_that_does_not_answer_has_no_series() -> None:
    def ask() -> EngineResidency:
        raise TimeoutError("busy")

    registry = CollectorRegistry()
    registry.register(VariantCollector(ask, CONFIG))
    assert registry.get_sample_value("ostinato_variant_slots") is None


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(CONFIG, "127.0.0.1")
    await worker.start()
    yield worker
    await worker.close()


async def test_a_worker_reports_and_exports_its_engine_s_residency(worker: Worker) -> None:
    for uid in (1, 2, 3):
        await worker.load_variant(VariantRef(f"v{uid}", uid, "/a"))
    seen = await worker.residency()
    assert [(v.uid, v.tier, v.slot) for v in seen.variants] == [
        (1, "device", 0),
        (2, "device", 1),
        (3, "host", None),
    ]
    assert seen.variants[2].reason
    assert seen.pid > 0
    address = (await worker.report()).metrics_address
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{address}/metrics")).text
    assert 'ostinato_variants{tier="device"} 2.0' in text
    ours = [line for line in text.splitlines() if line.startswith("ostinato_")]
    assert ours
    assert not any("v1" in line for line in ours)  # never a series per variant


async def test_the_limit_travels_with_requests(worker: Worker) -> None:
    async def ask(limit: int | None) -> int:
        call = EngineCall(
            "/v1/completions", b'{"model": "v", "prompt": "a"}', VariantRef("v", 7, "/a"), limit
        )
        assert (await asgi.call(worker.answer, call)).status == 200
        return (await worker.residency()).limit

    assert [await ask(limit) for limit in (None, 1, None, 2, 9)] == [2, 1, 1, 2, 2]


async def test_the_limit_of_a_launch_holds_from_the_start() -> None:
    from dataclasses import replace

    worker = Worker(replace(CONFIG, max_active_variants=1), "127.0.0.1")
    await worker.start()
    assert (await worker.residency()).limit == 1
    await worker.close()


def test_headers_name_a_limit_only_together_with_a_variant() -> None:
    variant = VariantRef("v", 7, "/a")
    for sent, limit in (
        (request_headers.request_headers("s", variant, 3), 3),
        (request_headers.request_headers("s", variant), None),
    ):
        headers = [(k.encode(), v.encode()) for k, v in sent.items()]
        assert (request_headers.variant_of(headers), request_headers.limit_of(headers)) == (variant, limit)
    assert request_headers.LIMIT not in request_headers.request_headers("s", None, 3)
