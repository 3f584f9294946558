"""One engine's share of a run, in a process of its own: a JSON line as soon as there is something to tell."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.serving import engines, playing, workload
from benchmarks.serving.metrics import summary
from benchmarks.serving.settings import GRACE_S, Settings
from workers.bus.client import VariantClient
from workers.variant_config import ADDRESS_VARIABLE

CHECKED_TOKENS = 8
WARM_PROMPTS, WARM_TOKENS = (16, 200, 700, 1900), 12
WARM = (1, 2, 3, 4)  # variants
AZURE = "AzureLLMInferenceTrace_conv.csv"


class OneEngine:
    """`deadline` (time.time) is when all must be done. The last line is `finished`: what an engine still does
    after it is of no interest."""

    def __init__(self, settings: Settings, engine: str, deadline: float) -> None:
        self._settings, self._engine, self._deadline = settings, engine, deadline
        self._lengths: workload.Lengths = ()
        self._paths: list[Path] = []
        self._llm: Any = None

    async def run(self) -> None:
        faulthandler.dump_traceback_later(self._left_s() + GRACE_S / 2, exit=True)
        try:
            await self._measure()
        except Exception:
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        self._tell(finished=True)
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None  # or it is shut down once more, when half of Python is gone

    async def _measure(self) -> None:
        await self._start()
        await self._warm()
        for limit in self._limits():
            for name in self._settings.cases:
                await self._case(name, limit)
        self._client.close()

    def _left_s(self) -> float:
        return max(1.0, self._deadline - time.time())

    def _limits(self) -> tuple[int, ...]:
        return self._settings.limits if self._engine == "ours" else (self._settings.resident,)

    # --- before the first case -----------------------------------------------------------------

    async def _start(self) -> None:
        start = time.perf_counter()
        self._paths = engines.prepare_files(self._settings, self._engine)
        written = time.perf_counter()
        engines.set_environment()
        self._llm = engines.start(self._settings, self._engine)
        self._client = VariantClient(os.environ[ADDRESS_VARIABLE])
        started = time.perf_counter()
        self._tell(
            files_s=round(written - start, 1),
            start_s=round(started - written, 1),
        )

    async def _warm(self) -> None:
        """Every variant into host memory, as when they are deployed; kernels compiled; answers compared."""
        start = time.perf_counter()
        last = self._settings.variants + (0 if self._engine == "ours" else 1)
        everyone = range(1, last + 1)
        # What is asked for and what is only prepared is read by different threads: from both ends at once.
        asked = [workload.Request(0.0, variant, 4, 1) for variant in everyone]
        await asyncio.gather(
            playing.play(self._llm, asked, self._prompt, self._variant, self._left_s()),
            *(self._client.prepare(v, self._path(v), self._left_s()) for v in reversed(everyone)),
        )
        prepared = time.perf_counter()
        read = (
            sum(engines.delta_bytes(Path(self._path(v))) for v in everyone) if self._engine == "ours" else 0
        )
        for length in WARM_PROMPTS:
            size = min(length, self._settings.max_model_len - WARM_TOKENS)
            asked = [workload.Request(0.0, v, size, WARM_TOKENS) for v in (*WARM, *WARM[:2])]
            await playing.play(self._llm, asked, self._prompt, self._variant, 120)
        state = await self._client.state()
        self._tell(
            prepare_s=round(prepared - start, 1),
            prepare_gb_per_s=round(read / (prepared - start) / 1e9, 3) if read else None,
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
        offline = workload.parse_case(name).kind == "offline"
        drain_s = self._settings.offline_s if offline else self._settings.drain_s
        worst_s = requests[-1].at_s + drain_s
        left_s = self._left_s()
        if left_s < worst_s:
            self._tell(**about, left_out=f"it may take {worst_s:.0f} s, {left_s:.0f} s are left")
            return
        await self._client.limit(limit)
        before = await self._client.state()
        outcomes, duration_s = await playing.play(self._llm, requests, self._prompt, self._variant, drain_s)
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
