"""One engine's share of a run, in a process of its own: a JSON line as soon as there is something to tell."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import engines, playing, workload
from benchmarks.serving.metrics import summary
from benchmarks.serving.settings import Settings
from workers.scheduling.client import VariantClient
from workers.variants.config import ADDRESS_VARIABLE

CHECKED_TOKENS = 8
WARM_PROMPTS, WARM_TOKENS = (16, 200, 700, 1900), 12
READING_S = 300.0
AZURE = "AzureLLMInferenceTrace_conv.csv"


class OneEngine:
    """`deadline` (time.time) is when all must be done."""

    def __init__(self, settings: Settings, engine: str, deadline: float) -> None:
        self._settings, self._engine, self._deadline = settings, engine, deadline
        self._lengths: workload.Lengths = ()
        self._paths: list[Path] = []

    async def run(self) -> None:
        await self._start()
        try:
            await self._warm()
            for limit in self._limits():
                for name in self._settings.cases:
                    await self._case(name, limit)
        finally:
            self._client.close()
            self._llm.shutdown()

    def _limits(self) -> tuple[int, ...]:
        return self._settings.limits if self._engine == "ours" else (self._settings.resident,)

    # --- before the first case -----------------------------------------------------------------

    async def _start(self) -> None:
        start = time.perf_counter()
        self._paths = engines.prepare_files(self._settings, self._engine)
        written = time.perf_counter()
        engines.set_environment(self._settings)
        self._llm = engines.start(self._settings, self._engine)
        self._client = VariantClient(os.environ[ADDRESS_VARIABLE])
        started = time.perf_counter()
        self._tell(
            files_s=round(written - start, 1),
            start_s=round(started - written, 1),
            exact_pinning=engines.PINNING in os.environ,
        )

    async def _warm(self) -> None:
        """Every variant into host memory, as when they are deployed; kernels compiled; answers compared."""
        start = time.perf_counter()
        last = self._settings.variants + (1 if self._engine == "baseline" else 0)
        everyone = range(1, last + 1)
        # What is asked for and what is only prepared is read by different threads: from both ends at once.
        asked = [workload.Request(0.0, variant, 4, 1) for variant in everyone]
        await asyncio.gather(
            playing.play(self._llm, asked, self._prompt, self._variant, READING_S),
            *(self._client.prepare(v, self._path(v), READING_S) for v in reversed(everyone)),
        )
        prepared = time.perf_counter()
        for length in WARM_PROMPTS:
            size = min(length, self._settings.max_model_len - WARM_TOKENS)
            asked = [workload.Request(0.0, v, size, WARM_TOKENS) for v in (1, 2, 3, 4, 1, 2)]
            await playing.play(self._llm, asked, self._prompt, self._variant, 120)
        state = await self._client.state()
        self._tell(
            prepare_s=round(prepared - start, 1),
            warm_s=round(time.perf_counter() - prepared, 1),
            variants_differ=await self._differ(),
            **_tiers(state),
        )

    async def _differ(self) -> bool:
        """Two variants of different weights answer differently, two of the same alike: swaps are real."""
        period = self._settings.payloads if self._engine == "ours" else self._settings.host_copies
        prompt = [5 + 7 * i for i in range(24)]
        one, other, same = [
            await playing.tokens_of(self._llm, prompt, self._variant(v), CHECKED_TOKENS, f"check-{v}")
            for v in (1, 2, 1 + period)
        ]
        return one == same and (period == 1 or one != other)

    # --- a case --------------------------------------------------------------------------------

    async def _case(self, name: str, limit: int) -> None:
        requests = self._requests(name)
        about = {"case": name, "limit": limit}
        if not requests:
            self._tell(**about, left_out="no request arrives in so short a time")
            return
        worst_s = requests[-1].at_s + self._settings.drain_s
        left_s = self._deadline - time.time()
        if left_s < worst_s:
            self._tell(**about, left_out=f"it may take {worst_s:.0f} s, {left_s:.0f} s are left")
            return
        await self._client.limit(limit)
        before = await self._client.state()
        outcomes, duration_s = await playing.play(
            self._llm, requests, self._prompt, self._variant, self._settings.drain_s
        )
        after = await self._client.state()
        counted = {key: after[key] - before[key] for key in ("skips", "preemptions")}
        self._tell(**about, **summary(outcomes, duration_s), **counted, **_tiers(after))

    def _requests(self, name: str) -> list[workload.Request]:
        settings, case = self._settings, workload.parse_case(name)
        if case.kind == "azure":
            text = (settings.traces / f"deltazip-azure-ar{case.rate}.jsonl").read_text()
            return workload.trace_requests(text, settings.variants, settings.max_model_len)
        self._lengths = self._lengths or workload.azure_lengths(
            (settings.traces / AZURE).read_text(), settings.max_model_len
        )
        return workload.synthetic(case, settings.seconds, settings.variants, self._lengths, settings.seed)

    def _prompt(self, request: workload.Request, index: int) -> list[int]:
        return workload.prompt_ids(request, index, self._settings.seed, self._settings.shape["vocab_size"])

    def _path(self, variant: int) -> str:
        return str(self._paths[variant % len(self._paths)])

    def _variant(self, variant: int) -> Any:
        """To the baseline the base is one more whole model."""
        from vllm.lora.request import LoRARequest

        if variant == 0 and self._engine == "ours":
            return None
        uid = variant or self._settings.variants + 1
        return LoRARequest(f"variant-{uid}", uid, self._path(uid))

    def _tell(self, **facts: Any) -> None:
        print(json.dumps({"engine": self._engine, **facts}), flush=True)


def _tiers(state: dict[str, Any]) -> dict[str, Any]:
    tiers = [variant["tier"] for variant in state["variants"]]
    sizes = [sum(v["device_bytes"].values()) for v in state["variants"] if v["tier"] == "device"]
    return {
        "on_device": tiers.count("device"),
        "in_host": sum(bool(variant["host_bytes"]) for variant in state["variants"]),
        "bytes_of_one": max(sizes, default=0),
    }
