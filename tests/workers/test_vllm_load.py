"""The load that a worker with a real engine reports, compared with the counts of its client and of vLLM's own
metrics."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY

from testkit import random_variants, started_worker
from testkit.engine_configs import ranks_of, vllm_config
from workers import load_lines, request_headers
from workers.messages import EngineConfig, VariantRef, WorkerLoad

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS, TOKENS, TOGETHER = 3, 40, 3
PROMPT = "The capital of France is"


@dataclass
class LoadReports:
    loads: list[WorkerLoad]

    @property
    def steps(self) -> int:
        return sum(load.steps for load in self.loads)

    @property
    def decode_s(self) -> float:
        return sum(load.steps * load.step_s for load in self.loads)


@dataclass
class Lab(started_worker.Lab):
    """The worker is behind its door."""

    variant: VariantRef

    async def ask(self, http: httpx.AsyncClient, variant: VariantRef | None) -> int:
        """The prompt's length in tokens."""
        report = await self.worker.report()
        body = {
            "model": variant.name if variant else "base",
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": os.urandom(8).hex(),
        }
        headers = request_headers.request_headers(report.secret, variant)
        answer = await http.post(f"http://{report.address}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    async def while_asking(self, count: int, variant: VariantRef | None = None) -> tuple[LoadReports, int]:
        """The reports until `count` requests at once were answered and nothing is left to do, and the
        tokens of their prompts."""
        reports = LoadReports([])
        async with httpx.AsyncClient(trust_env=False, timeout=600) as http:
            loads = self.listen(http)
            await anext(loads)
            asking = asyncio.gather(*(self.ask(http, variant) for _ in range(count)))
            async for load in loads:
                reports.loads.append(load)
                if asking.done() and not load.ongoing and not load.steps:
                    break
        return reports, sum(await asking)

    async def listen(self, http: httpx.AsyncClient) -> AsyncIterator[WorkerLoad]:
        report = await self.worker.report()
        headers = {request_headers.SECRET: report.secret}
        url = f"http://{report.address}{load_lines.PATH}"
        async with http.stream("GET", url, headers=headers) as answer:
            async for line in answer.aiter_lines():
                yield load_lines.load_of(line.encode())


def config(base: Path) -> EngineConfig:
    return vllm_config(
        base,
        ranks_of((LAYERS,), kv_cache_bytes=64 << 20, memory_bytes=2 << 30, variant_memory_bytes=64 << 20),
        max_num_seqs=8,
        variant_host_bytes=1 << 28,
    )


@pytest.fixture(scope="module")
def lab(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("load")
    base = random_variants.first_layers(smollm2_folder, folder / "base", LAYERS)
    lora = random_variants.EVERY_KIND[0]
    variant = VariantRef("lora", 7, str(random_variants.write(base, folder / "lora", lora)))
    with started_worker.started(config(base), started_worker.ONE_THREAD) as (worker, loop):
        made = Lab(worker, loop, variant)
        made.run(worker.open_door("127.0.0.1"))
        made.run(made.while_asking(1))  # what is compiled is compiled
        yield made


def gaps_s() -> float:
    """Seconds from token to token of all rows, as vLLM itself has added them up."""
    name = "vllm:inter_token_latency_seconds_sum"
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == name)


def test_one_request_is_reported_step_by_step(lab: Lab) -> None:
    before_s, began_s = gaps_s(), time.monotonic()
    reports, prompt_tokens = lab.run(lab.while_asking(1))
    took_s, counted_s = time.monotonic() - began_s, gaps_s() - before_s
    print(
        f"\n{reports.steps} steps of {1e3 * reports.decode_s / reports.steps:.2f} ms in"
        f" {len(reports.loads)} lines"
    )
    assert reports.steps == TOKENS - 1
    # A step that took very long counts less; nothing counts more than vLLM counted.
    assert 0.1 * counted_s < reports.decode_s <= counted_s * (1 + 1e-6)
    assert sum(load.prefill_tokens for load in reports.loads) == prompt_tokens
    assert 0.0 < sum(load.prefill_s for load in reports.loads) < took_s
    assert max(load.ongoing for load in reports.loads) == 1
    assert max(load.running for load in reports.loads) == 1
    assert 0.0 < max(load.kv_usage for load in reports.loads) < 1.0
    assert (reports.loads[-1].running, reports.loads[-1].waiting, reports.loads[-1].kv_usage) == (0, 0, 0.0)


def test_requests_in_one_batch_share_their_steps(lab: Lab) -> None:
    before_s = gaps_s()
    reports, prompt_tokens = lab.run(lab.while_asking(TOGETHER))
    assert TOKENS - 1 <= reports.steps <= TOGETHER * (TOKENS - 1)
    assert reports.decode_s <= (gaps_s() - before_s) * (1 + 1e-6)
    assert sum(load.prefill_tokens for load in reports.loads) == prompt_tokens
    assert max(load.ongoing for load in reports.loads) == TOGETHER


def test_a_variant_s_location_is_reported(lab: Lab) -> None:
    reports, _ = lab.run(lab.while_asking(1, lab.variant))
    assert reports.steps == TOKENS - 1

    async def final_load() -> WorkerLoad:
        async with httpx.AsyncClient(trust_env=False, timeout=600) as http:
            async for load in lab.listen(http):
                if load.variants == ((7, "device"),):
                    return load
        raise AssertionError("the worker ended it")

    lab.run(final_load())
