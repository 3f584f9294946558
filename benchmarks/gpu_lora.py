"""The cost of adapters per step on a GPU: the base alone, vLLM's own LoRA, and ours, on the same work.

    python -m benchmarks.gpu_lora --out RESULT.json [--shape llama-2-7b] [--engines "SET,SET;SET"]

A 7B shape with dummy weights in bfloat16, CUDA graphs on; each engine in a process of its own. Sets of
adapters between semicolons share an engine, made for the most adapters and the largest rank among them.
Rows of a shape, engine and set replace those that RESULT has of them; a set is compared with the base of its
`run`.
Milliseconds per output token: the time for many tokens less that for few, over their difference; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import gpu_engine, rehearsing
from benchmarks.rehearsal_engine import SHAPE as REHEARSED
from workers.variant_config import VariantConfig

PROMPT_TOKENS, FEW, MANY, ROUNDS = 32, 16, 112, 3
BATCHES = (1, 8, 32, 128)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# name -> ranks of the adapters
SETS = {"8 x r16": [16] * 8, "32 x r16": [16] * 32, "8 x r8..64": [8, 16, 32, 64] * 2, "8 x r64": [64] * 8}


SHAPES = {"llama-2-7b": gpu_engine.LLAMA_7B, "qwen2.5-7b": gpu_engine.QWEN_7B}


def write_adapter(
    folder: Path,
    rank: int,
    seed: int,
    shape: dict[str, int],
    modules: Sequence[str] = ATTENTION,
    deviation: float = 0.02,
) -> Path:
    """Write a random LoRA on these linear layers, as PEFT does. `deviation` is that of B."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shapes = {
        name: dims for name, dims in gpu_engine.linear_shapes(shape).items() if name.split(".")[-1] in modules
    }
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, (out, into) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            a, b = rng.standard_normal((rank, into)), rng.standard_normal((out, rank))
            tensors[f"{name}.lora_A.weight"] = (a / into**0.5).astype(np.float16)
            tensors[f"{name}.lora_B.weight"] = (deviation * b).astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": list(modules),
        "base_model_name_or_path": "dummy-7b",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapters(work: Path, ranks: list[int], shape: dict[str, int]) -> list[Path]:
    found = []
    for seed, rank in enumerate(ranks):
        folder = work / f"r{rank}-{seed}"
        found.append(folder if folder.exists() else write_adapter(folder, rank, seed, shape))
    return found


def measure(llm: Any, requests: list[Any], batch: int, vocabulary: int) -> dict[str, float]:
    """Milliseconds per output token of a batch whose rows take the adapters in turn."""
    from vllm import SamplingParams

    prompts = [
        {
            "prompt_token_ids": [
                (37 * i + 11 * j) % min(30000, vocabulary - 5) + 5 for j in range(PROMPT_TOKENS)
            ]
        }
        for i in range(batch)
    ]
    chosen = [requests[i % len(requests)] for i in range(batch)] if requests else None

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, sampling, lora_request=chosen, use_tqdm=False)
        return time.perf_counter() - start

    seconds(FEW)
    found = [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) * 1e3 for _ in range(ROUNDS)]
    return {"batch": batch, "tpot_ms": round(statistics.median(found), 4), "lowest_ms": round(min(found), 4)}


def one(kind: str, names: list[str], work: Path, shape_name: str) -> None:
    """One engine: prints a JSON line per set and batch."""
    shape = SHAPES[shape_name]
    base = gpu_engine.write_dummy_base(work / "base", shape)
    sets = {name: SETS[name] for name in names}
    slots, most = max(map(len, sets.values()), default=0), max(map(max, sets.values()), default=0)
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 128}
    options["compilation_config"] = {"cudagraph_capture_sizes": list(BATCHES)}
    variants = None
    if kind == "ours":
        variants = VariantConfig(slots, 4 << 30, 8 << 30, most, kinds=("lora",))
    elif kind == "vllm":
        options |= {"enable_lora": True, "max_loras": slots, "max_lora_rank": most}
    start = time.perf_counter()
    llm = gpu_engine.make_engine(base, variants, **options)
    about = {"shape": shape_name, "engine": kind, "start_s": round(time.perf_counter() - start)}
    for name, ranks in sets.items() or {"": list[int]()}.items():
        requests = requested(work, ranks, shape)
        for batch in BATCHES:
            row = {
                **about,
                "set": name,
                "slots": slots,
                "max_rank": most,
                **measure(llm, requests, batch, shape["vocab_size"]),
            }
            print(json.dumps(row), flush=True)


def requested(work: Path, ranks: list[int], shape: dict[str, int]) -> list[Any]:
    if not ranks:
        return []
    from vllm.lora.request import LoRARequest

    folders = adapters(work, ranks, shape)
    numbers = [1000 * rank + seed for seed, rank in enumerate(ranks)]  # a name's own in all sets of an engine
    return [LoRARequest(f.name, n, str(f)) for n, f in zip(numbers, folders, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-lora"))
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--engines", default="8 x r16", help="sets by comma, engines by semicolon")
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        kind, names = given.one
        one(kind, [name for name in names.split(",") if name], given.work / given.shape, given.shape)
        return
    given.out.parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((row["run"] for row in known(given.out)), default=0)
    keep(given.out, number, run(given, "base", ""))
    for names in given.engines.split(";"):
        for name in names.split(","):
            adapters(given.work / given.shape, SETS[name], SHAPES[given.shape])
        for kind in ("vllm", "ours"):
            keep(given.out, number, run(given, kind, names))
    drop_bases(given.out)


def run(given: argparse.Namespace, kind: str, names: str) -> list[dict[str, Any]]:
    arguments = ("--one", kind, names, "--work", str(given.work), "--shape", given.shape)
    return gpu_engine.in_own_process("benchmarks.gpu_lora", *arguments, plugins=kind == "ours")


def known(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    rehearsing.write_result(path, {"command": "python -m benchmarks.gpu_lora", "rows": rows})


def keep(path: Path, number: int, rows: list[dict[str, Any]]) -> None:
    """Add rows to the file, in place of rows with the same shape, engine and set, and the bases' rows."""
    new = {(row["shape"], row["engine"], row["set"]) for row in rows if row["set"]}
    old = [row for row in known(path) if (row["shape"], row["engine"], row["set"]) not in new]
    write(path, [*old, *({**row, "run": number} for row in rows)])


def drop_bases(path: Path) -> None:
    """Those of runs of which nothing else is left."""
    rows = known(path)
    used = {row["run"] for row in rows if row["set"]}
    write(path, [row for row in rows if row["run"] in used])


def rehearse(folder: Path, llm: Any) -> None:
    """The base and two adapters of different ranks in a batch, and what is kept of two runs."""
    out, ranks = folder / "lora.json", [4, 16]
    for number in (1, 2):
        for kind, name in (("base", ""), ("ours", "2")):
            requests = requested(folder, ranks if name else [], REHEARSED)
            about = {"shape": "tiny", "engine": kind, "set": name}
            keep(out, number, [{**about, **measure(llm, requests, 2, REHEARSED["vocab_size"])}])
    drop_bases(out)
    rows = rehearsing.check(out)["rows"]
    assert [(row["engine"], row["run"]) for row in rows] == [("base", 2), ("ours", 2)]


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
