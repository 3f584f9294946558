"""How long the first token of a variant takes that is not on the GPU: on disk, or in host memory.

    python -m benchmarks.first_token --out RESULT.json [--variants r16,r64,delta] [--beside 0,8,32]

A Llama-2-7B shape with dummy weights in bfloat16, CUDA graphs on; an engine in a process of its own for each
of the variants:

- `r16`: LoRA of rank 16 on q, k, v and o (34 MB); `r64`: of rank 64 on all linears (320 MB);
- `delta`: a 4-bit sparse delta of all of the model (3 GB).

Files lie in the page cache. TTFT of a prompt of PROMPT tokens, in milliseconds, medians: `disk`, the
variant was never asked for; `host`, it has left the GPU for others; `warm`, it is in a slot. `beside`: so
many streams of the base decode meanwhile, and `gap_p99_ms` are the gaps between their tokens until the first
token is there (`none`: with nothing that arrives). `read_gb_per_s`: one thread reads the files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu_engine, gpu_lora, rehearsing
from benchmarks.rehearsal_engine import SHAPE as REHEARSED
from benchmarks.rehearsal_engine import SLOTS as REHEARSED_SLOTS
from benchmarks.serving import deltas
from benchmarks.streams import Player, Stream, median
from workers.group.cuda_graphs import graph_sizes, sizes_for
from workers.variant_config import VariantConfig

GIB = 1 << 30
LINEARS = (*gpu_lora.ATTENTION, "gate_proj", "up_proj", "down_proj")
VARIANTS = ("r16", "r64", "delta")
SLOTS, PROMPT, KV_GIB, MAX_SEQUENCES = 3, 128, 7, 40
STATES = ("disk", "host", "warm")
TIMEOUT_S = 400


@dataclass(frozen=True)
class Sizes:
    """`tokens`: of a stream that decodes beside; `after` so many of them a variant is asked for."""

    slots: int = SLOTS
    prompt: int = PROMPT
    tokens: int = 400
    after: int = 40
    rounds: int = 5


def written(kind: str, base: Path, shape: dict[str, int], folder: Path) -> Path:
    match kind:
        case "delta":
            return deltas.write(base, shape, folder / kind, 4, 0)
        case "r16":
            return gpu_lora.write_adapter(folder / kind, 16, 0, shape)
        case _:
            return gpu_lora.write_adapter(folder / kind, 64, 0, shape, LINEARS)


def measured(
    player: Player, kind: str, folder: Path, beside: Sequence[int], sizes: Sizes, first: int = 1
) -> list[dict[str, Any]]:
    """`first`: the number of the first variant; all have the files of `folder`."""
    numbers = itertools.count(first)
    read = read_rate(folder)
    about = {"variant": kind, "bytes": read[0], "read_gb_per_s": read[1]}
    player.play([Stream(sizes.prompt, 2, _request(folder, next(numbers)))])  # whatever comes with a first one
    return [{**about, **_beside(player, folder, streams, sizes, numbers)} for streams in beside]


def _beside(
    player: Player, folder: Path, streams: int, sizes: Sizes, numbers: itertools.count[int]
) -> dict[str, Any]:
    asked = [_request(folder, next(numbers)) for _ in range(max(sizes.rounds, 2 * sizes.slots))]
    ttft: dict[str, list[float]] = {state: [] for state in STATES}
    gaps: dict[str, list[float]] = {state: [] for state in (*STATES, "none")}

    def ask(variant: Any, state: str) -> None:
        others = [Stream(sizes.prompt // 2, sizes.tokens, None) for _ in range(streams)]
        late = Stream(sizes.prompt, 2, variant, after=sizes.after if others else 0)
        player.play([*others, late])
        ttft[state].append(late.ttft_ms)
        until_s = late.arrivals_s[0]
        for stream in others:
            gaps[state] += stream.gaps_ms(late.sent_s, until_s)
            gaps["none"] += stream.gaps_ms(until_s + 0.02)[2:]  # what came with it is over

    for variant in asked:
        ask(variant, "disk")
    for variant in asked:  # those asked for last are in the slots
        ask(variant, "host")
        ask(variant, "warm")
    found: dict[str, Any] = {"beside": streams, "ttft_ms": {state: median(ttft[state]) for state in STATES}}
    if streams:
        found["gap_p99_ms"] = {
            state: round(float(np.quantile(each, 0.99)), 3) for state, each in gaps.items() if each
        }
    return found


def read_rate(folder: Path) -> tuple[int, float]:
    """(bytes, GB/s) of its files; the second of two readings, so that they lie in the page cache."""
    memory = bytearray(max(path.stat().st_size for path in folder.glob("*.safetensors")))
    for _ in range(2):
        total, start_s = 0, time.perf_counter()
        for path in folder.glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                total += file.readinto(memory) or 0
        took_s = time.perf_counter() - start_s
    return total, round(total / took_s / 1e9, 2)


def _request(folder: Path, number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"variant-{number}", number, str(folder))


def one(kind: str, beside: Sequence[int], work: Path) -> None:
    """One engine: prints JSON lines."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as it is served
    shape, sizes = gpu_engine.LLAMA_7B, Sizes()
    base = gpu_engine.write_dummy_base(work / "base", shape)
    folder = written(kind, base, shape, work)
    size = read_rate(folder)[0]
    steps = (1, sizes.prompt, *beside, *(b + 1 for b in beside), *(b + sizes.prompt for b in beside), 2048)
    llm = gpu_engine.make_engine(
        base,
        VariantConfig(
            SLOTS,
            int(SLOTS * size * 1.05) + (64 << 20),
            40 * GIB,
            64,
            kinds=("sparse_delta",) if kind == "delta" else ("lora",),
        ),
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.95,
        kv_cache_memory_bytes=KV_GIB * GIB,
        compilation_config={"cudagraph_capture_sizes": sizes_for(steps, graph_sizes(MAX_SEQUENCES, 4096))},
    )
    player = Player(llm, shape["vocab_size"])
    for streams in beside:
        first = 1 + 1000 * streams
        for row in measured(player, kind, folder, [streams], sizes, first):
            print(json.dumps(row), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/first-token"))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--beside", default="0,8,32")
    parser.add_argument("--one", choices=VARIANTS)
    given = parser.parse_args(argv)
    if given.one:
        one(given.one, [int(n) for n in given.beside.split(",")], given.work)
        return
    import torch

    record: dict[str, Any] = {"command": rehearsing.command("benchmarks.first_token", argv)}
    record |= {"device": torch.cuda.get_device_name(0), "rows": []}
    for kind in given.variants.split(","):
        command = ("--one", kind, "--beside", given.beside, "--work", str(given.work))
        record["rows"] += gpu_engine.in_own_process("benchmarks.first_token", *command, timeout_s=TIMEOUT_S)
        rehearsing.write_result(given.out, record)


def rehearse(folder: Path, llm: Any) -> None:
    """An adapter in the engine that rehearsals share, alone and beside a stream."""
    path = gpu_lora.write_adapter(folder / "r4", 4, 0, REHEARSED, LINEARS)
    sizes = Sizes(slots=REHEARSED_SLOTS, prompt=6, tokens=24, after=2, rounds=1)
    player = Player(llm, REHEARSED["vocab_size"])
    rows = measured(player, "r4", path, [0, 1], sizes, first=7000)
    assert all(row["ttft_ms"][state] > 0 for row in rows for state in STATES)
    assert rows[1]["gap_p99_ms"]["disk"] > 0
    rehearsing.write_result(folder / "first_token.json", {"rows": rows})
    rehearsing.check(folder / "first_token.json", "rows")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
