"""The measurements of a rehearsal of the serving benchmark, in the engine that all rehearsals share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.rehearsal_engine import MAX_MODEL_LEN, SHAPE, base_of
from benchmarks.serving import deltas, playing, workload
from benchmarks.serving.metrics import summary

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,12,4\n0,30,6\n"
VARIANTS, SECONDS, DRAIN_S, SEED = 2, 0.5, 60.0, 1


class OneAfterTheOther:
    """vLLM's AsyncLLM interface, over an engine that answers one request at a time."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def generate(
        self, prompt: dict[str, Any], sampling: Any, name: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        for answer in self._llm.generate([prompt], sampling, lora_request=lora_request, use_tqdm=False):
            yield answer


def rows_of(folder: Path, llm: Any) -> list[dict[str, Any]]:
    """A case of deltas, and the same as if it were the baseline's."""
    from vllm.lora.request import LoRARequest

    paths = [
        deltas.write(base_of(llm), SHAPE, folder / f"delta-{number}", bits=4, seed=number)
        for number in range(VARIANTS)
    ]
    case = workload.parse_case("zipf@8")
    lengths = workload.azure_lengths(AZURE, MAX_MODEL_LEN)
    requests = workload.synthetic(case, SECONDS, VARIANTS, lengths, SEED)

    def prompt(request: workload.Request, index: int) -> list[int]:
        return workload.prompt_ids(request, index, SEED, SHAPE["vocab_size"])

    def variant(number: int) -> Any:
        return LoRARequest(f"delta-{number}", 5000 + number, str(paths[number - 1]))

    engine = OneAfterTheOther(llm)
    outcomes, duration_s = asyncio.run(playing.play(engine, requests, prompt, variant, DRAIN_S))
    row = {"case": case.name, "limit": VARIANTS, **summary(outcomes, duration_s)}
    assert row["requests"] > 0
    assert row["unfinished"] == 0
    return [{"engine": name, **row} for name in ("ours", "baseline")]
