"""The time to the first token of a variant that is not on the GPU: on disk, or in host memory.

    python -m benchmarks.first_token --out RESULT.json [--variants r16,r64,delta] [--beside 0,8,32]

A Llama-2-7B shape with dummy weights in bfloat16, CUDA graphs on; an engine in a process of its own for each
of the variants:

- `r16`: LoRA of rank 16 on q, k, v and o (34 MB); `r64`: of rank 64 on all linears (320 MB);
- `delta`: a 4-bit sparse delta of all of the model (3 GB).

Files lie in the page cache. TTFT of a prompt of PROMPT tokens, in milliseconds, medians: `disk`, the
variant was never asked for; `host`, it has left the GPU for others; `warm`, it is in a slot. `beside`: this
number of base streams decode meanwhile, and `gap_p99_ms` are the gaps between their tokens until the first
token is there (`none`: with nothing that arrives). `read_gb_per_s`: one thread reads the files.
`same_tokens`: how many of the answers are those of the same variant when it is warm; a slot's variant before
has other values.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
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
TIMEOUT_S = 570


@dataclass(frozen=True)
class Sizes:
    """`tokens`: of a stream that decodes meanwhile; a variant is requested when it has `after` of them."""

    slots: int = SLOTS
    prompt: int = PROMPT
    tokens: int = 160
    after: int = 40
    rounds: int = 8


def written(kind: str, base: Path, shape: dict[str, int], folder: Path) -> list[Path]:
    """Two of the same sizes and other values, which variants have in turn; of deltas one."""
    match kind:
        case "delta":
            return [deltas.write(base, shape, folder / kind, 4, 0)]
        case "r16":
            return [gpu_lora.write_adapter(folder / f"{kind}-{n}", 16, n, shape) for n in range(2)]
        case _:
            return [gpu_lora.write_adapter(folder / f"{kind}-{n}", 64, n, shape, LINEARS) for n in range(2)]


class Measuring:
    """Asks for variants whose files are those of `folders` in turn. `first`: the number of the first one."""

    def __init__(self, player: Player, folders: Sequence[Path], sizes: Sizes, first: int = 1) -> None:
        self._player, self._folders, self._sizes = player, folders, sizes
        self._numbers = itertools.count(first)
        self._ask(self._new(1)[0], 0)  # whatever comes with a first one

    def from_disk(self, streams: int) -> dict[str, Any]:
        """Variants without an earlier request, next to N base streams; then the same from host memory."""
        asked = self._new(max(self._sizes.rounds, 2 * self._sizes.slots))
        disk = [self._ask(variant, streams) for variant in asked]
        return self._found(streams, {"disk": disk, **self._from_host(asked, streams)})

    def _from_host(self, asked: Sequence[Any], streams: int) -> dict[str, list[Asked]]:
        pairs = [(self._ask(variant, streams), self._ask(variant, streams)) for variant in asked]
        return {"host": [host for host, _ in pairs], "warm": [warm for _, warm in pairs]}

    def _new(self, count: int) -> list[Any]:
        return [self._request(n) for n in itertools.islice(self._numbers, count)]

    def _request(self, number: int) -> Any:
        from vllm.lora.request import LoRARequest

        folder = self._folders[number % len(self._folders)]
        return LoRARequest(f"variant-{number}", number, str(folder))

    def _ask(self, variant: Any, streams: int) -> Asked:
        sizes = self._sizes
        others = [Stream(sizes.prompt // 2, sizes.tokens, None, seed=n) for n in range(streams)]
        late = Stream(sizes.prompt, 2, variant, after=sizes.after if others else 0, seed=1000)
        self._player.play([*others, late])
        until_s = late.arrivals_s[0]
        beside = [gap for stream in others for gap in stream.gaps_ms(late.sent_s, until_s)]
        over_s = until_s + 0.02  # of what came with it
        later = [gap for stream in others for gap in stream.gaps_ms(over_s)[2:]]
        return Asked(variant.lora_int_id % len(self._folders), late.ttft_ms, late.ids, beside, later)

    def _found(self, streams: int, asked: dict[str, list[Asked]]) -> dict[str, Any]:
        found: dict[str, Any] = {"beside": streams}
        found["ttft_ms"] = {state: median(each.ttft_ms for each in own) for state, own in asked.items()}
        found["ttft_all_ms"] = {
            state: [round(each.ttft_ms, 2) for each in own] for state, own in asked.items()
        }
        warm = {each.values: each.ids for each in asked["warm"]}
        same = [each.ids == warm[each.values] for own in asked.values() for each in own]
        found["same_tokens"] = f"{sum(same)} of {len(same)}"
        if streams:
            gaps = {state: [gap for each in own for gap in each.gaps_ms] for state, own in asked.items()}
            gaps["none"] = [gap for own in asked.values() for each in own for gap in each.later_ms]
            found["gap_p99_ms"] = {
                state: round(float(np.quantile(each, 0.99)), 3) for state, each in gaps.items() if each
            }
        return found


@dataclass(frozen=True)
class Asked:
    """`values`: the number of the files that it has. `gaps_ms` are those of the other streams until its first
    token, and `later_ms` those after it."""

    values: int
    ttft_ms: float
    ids: list[int]
    gaps_ms: list[float]
    later_ms: list[float]


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


def one(kind: str, beside: Sequence[int], work: Path) -> None:
    """One engine: prints JSON lines."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as it is served
    shape, sizes = gpu_engine.LLAMA_7B, Sizes()
    base = gpu_engine.write_dummy_base(work / "base", shape)
    folders = written(kind, base, shape, work)
    size = read_rate(folders[0])[0]
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
    for row in measured(player, kind, folders, beside, sizes):
        print(json.dumps(row), flush=True)


def measured(
    player: Player, kind: str, folders: Sequence[Path], beside: Sequence[int], sizes: Sizes
) -> Iterator[dict[str, Any]]:
    measuring = Measuring(player, folders, sizes)
    for streams in beside:
        bytes_, rate = read_rate(folders[0])
        yield {"variant": kind, "bytes": bytes_, "read_gb_per_s": rate, **measuring.from_disk(streams)}


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
    """An adapter in the engine that rehearsals share, alone and next to a stream."""
    folders = [gpu_lora.write_adapter(folder / f"r4-{n}", 4, n, REHEARSED, LINEARS) for n in range(2)]
    sizes = Sizes(slots=REHEARSED_SLOTS, prompt=6, tokens=24, after=2, rounds=1)
    player = Player(llm, REHEARSED["vocab_size"])
    measuring = Measuring(player, folders, sizes, first=7000)
    rows = [measuring.from_disk(streams) for streams in (0, 1)]
    assert all(row["ttft_ms"][state] > 0 for row in rows for state in STATES)
    assert all(len(set(row["same_tokens"].split(" of "))) == 1 for row in rows)
    assert rows[1]["gap_p99_ms"]["disk"] > 0
    rehearsing.write_result(folder / "first_token.json", {"rows": rows})
    rehearsing.check(folder / "first_token.json", "rows")


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
