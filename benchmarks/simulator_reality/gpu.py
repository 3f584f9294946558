"""Reality on one GPU: vLLM with our plug-in in this process, without Ray; LoRAs and deltas in one batch.

    python -m benchmarks.simulator_reality.gpu --out MEASURED.json [--shape 7b] [--load 0.5] [--seconds 120]

A base with dummy weights in bfloat16, LoRAs of several ranks and compressed deltas of 3 GB each, CUDA graphs
on. Writes measurements for `python -m benchmarks.simulator_reality`. The files take 13 GB
below --work.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_engine, gpu_lora, rehearsing
from benchmarks.rehearsal_engine import SHAPE, base_of
from benchmarks.serving import deltas, playing
from benchmarks.serving.engines import delta_bytes, set_environment
from benchmarks.serving.metrics import Outcome
from benchmarks.serving.rehearsal import OneAfterTheOther
from benchmarks.serving.settings import GIB, SHAPES
from benchmarks.serving.workload import Request, prompt_ids
from benchmarks.simulator_reality.loads import MARGIN, OUTPUT, SHORT
from benchmarks.simulator_reality.measuring import Workload, as_json, measure
from benchmarks.simulator_reality.types import Asked, Facts, Play, Timed, VariantFacts
from workers.group.cuda_graphs import compilation, graph_sizes
from workers.group.vllm_arguments import RANK_PLUGIN
from workers.kernels.rows import LARGE_FROM
from workers.variant_config import VariantConfig

LENGTHS = ((64, 64), (128, 96), (256, 128), (512, 192), (1024, 128))
RANKS, DELTAS, BITS = (8, 16, 32, 64), 4, 4
ROWS, STEP_TOKENS, MAX_LEN = 32, 2048, 2048
DRAIN_S = 300.0
ALIGNED = 1.01  # a variant's arrays are aligned in the arena


def write_variants(
    work: Path, base: Path, shape: dict[str, int], ranks: Sequence[int], count: int
) -> list[Path]:
    loras = [
        gpu_lora.write_adapter(work / f"lora{i}-r{rank}", rank, i, shape) for i, rank in enumerate(ranks)
    ]
    return [*loras, *(deltas.write(base, shape, work / f"delta{i}", BITS, i) for i in range(count))]


def facts_of(folders: Sequence[Path], ranks: Sequence[int], rows: int, kv_tokens: int, max_len: int) -> Facts:
    """The settings of one engine, which is called in this process only."""
    variants = tuple(
        VariantFacts(
            folder.name, *(("lora", ranks[i]) if i < len(ranks) else ("sparse_delta", 0)), delta_bytes(folder)
        )
        for i, folder in enumerate(folders)
    )
    return Facts(
        groups=1,
        rows=rows,
        slots=len(folders),
        kv_tokens=kv_tokens,
        batched_tokens=STEP_TOKENS,
        max_model_len=max_len,
        max_ongoing=1 << 12,
        policy="most-idle",
        path_s=0.0,
        variants=variants,
        wide_from=wide_from(rows),
    )


def wide_from(rows: int) -> int:
    """Tokens from which on a step's graph has room for enough rows that our kernels use large tiles."""
    return 1 + max(size for size in graph_sizes(rows, STEP_TOKENS) if size < LARGE_FROM)


def player(llm: Any, folders: Sequence[Path], vocabulary: int) -> Play:
    from vllm.lora.request import LoRARequest

    played = [0]

    def variant(number: int) -> Any:
        if number == 0:
            return None
        return LoRARequest(folders[number - 1].name, 7000 + number, str(folders[number - 1]))

    async def play(asked: Sequence[Asked]) -> list[Timed]:
        played[0] += 1
        requests = [Request(a.at_s, a.model, a.prompt, a.output) for a in asked]

        def prompt(request: Request, index: int) -> list[int]:
            return prompt_ids(request, index, 100 + played[0], vocabulary)

        outcomes, _ = await playing.play(llm, requests, prompt, variant, DRAIN_S)
        return [_timed(outcome, request) for outcome, request in zip(outcomes, requests, strict=True)]

    return play


def _timed(outcome: Outcome, request: Request) -> Timed:
    if outcome.ttft_s is None or outcome.e2e_s is None:
        raise RuntimeError(
            f"expected {request.output_tokens} tokens within {DRAIN_S:.0f} s, got {outcome.tokens}"
        )
    return Timed(
        outcome.ttft_s, (outcome.e2e_s - outcome.ttft_s) / max(1, request.output_tokens - 1), outcome.e2e_s
    )


def start(base: Path, folders: Sequence[Path], kv_gib: float) -> Any:
    """vLLM's AsyncLLM, with room for all variants in slots."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arena = int(ALIGNED * sum(map(delta_bytes, folders))) + (256 << 20)
    config = VariantConfig(len(folders), arena, 2 * arena, max(RANKS), kinds=("lora", "sparse_delta"))
    memory = {"kv_cache_memory_bytes": int(kv_gib * GIB), "gpu_memory_utilization": 0.95}
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(base),
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            max_num_seqs=ROWS,
            max_num_batched_tokens=STEP_TOKENS,
            disable_log_stats=True,
            enable_lora=True,
            max_lora_rank=max(RANKS),
            max_loras=len(folders),
            scheduler_cls="workers.engine.scheduler.make_scheduler",
            worker_extension_cls=RANK_PLUGIN,  # the tree need not be installed there
            additional_config=config.as_json(),
            compilation_config=compilation(1, ROWS, STEP_TOKENS),  # as the product has it
            **(memory if torch.cuda.is_available() else {}),  # a dry run on a CPU has its own
        )
    )


def kv_tokens_of(kv_gib: float, shape: dict[str, int]) -> int:
    head = shape["hidden_size"] // shape["num_attention_heads"]
    return int(kv_gib * GIB / (4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head))


async def _measure(given: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[given.shape]
    base = gpu_engine.write_dummy_base(given.work / "base", shape)
    folders = write_variants(given.work, base, shape, RANKS, given.deltas)
    llm = start(base, folders, given.kv_gib)
    try:
        facts = facts_of(folders, RANKS, ROWS, kv_tokens_of(given.kv_gib, shape), MAX_LEN)
        play = player(llm, folders, shape["vocab_size"])
        await play([Asked(0.0, model, 16, 2) for model in range(1 + len(folders))])  # all of them read
        work = Workload(given.load, given.seconds, LENGTHS, given.seed)
        return as_json(await measure(play, facts, work, given.repeats))
    finally:
        llm.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    parser = rehearsing.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--deltas", type=int, default=DELTAS)
    parser.add_argument("--kv-gib", type=float, default=24.0)
    parser.add_argument("--load", type=float, default=0.5, help="share of what the engine can do")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/simulator-reality"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    set_environment()
    found = asyncio.run(_measure(given))
    command = rehearsing.command("benchmarks.simulator_reality.gpu", argv)
    machine = f"{platform.machine()}, {_device()}, {os.cpu_count()} cores"
    rehearsing.write_result(given.out, {"command": command, "machine": machine, **found})


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "no GPU"


def rehearse(folder: Path, llm: Any) -> None:
    """Two LoRAs and a delta in the engine that all share, which answers one request at a time."""
    ranks = (4, 16)
    folders = write_variants(folder, base_of(llm), SHAPE, ranks, 1)
    short = OUTPUT + MARGIN + SHORT + 2  # prompts of loads have three lengths then
    facts = facts_of(folders, ranks, rows=2, kv_tokens=1 << 14, max_len=short)
    play = player(OneAfterTheOther(llm), folders, SHAPE["vocab_size"])
    work = Workload(0.5, 0.5, ((12, 4), (30, 6)), max_per_s=20.0)

    async def paced(asked: Sequence[Asked]) -> list[Timed]:
        """An answer that comes whole has no time between tokens, and an engine without any could do all."""
        return [dataclasses.replace(one, tpot_s=0.02) for one in await play(asked)]

    found = as_json(asyncio.run(measure(paced, facts, work, repeats=0)))
    rehearsing.write_result(folder / "measured.json", found)
    assert rehearsing.check(folder / "measured.json", "facts", "seen")["seen"]["measured"]
    json.dumps(found)


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
