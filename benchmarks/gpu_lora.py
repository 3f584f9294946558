"""What adapters cost per step on a GPU: the base alone, vLLM's own LoRA, and ours, on the same work.

    python -m benchmarks.gpu_lora --out RESULT.json [--layers 32]

A Llama-2-7B shape with dummy weights in bfloat16, CUDA graphs on; each engine in a process of its own.
Milliseconds per output token: the time for many tokens less that for few, over their difference; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import gpu_engine
from workers.variants.config import VariantConfig

PROMPT_TOKENS, FEW, MANY, ROUNDS = 32, 16, 112, 3
BATCHES = (1, 8, 32, 128)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
# name -> ranks of the adapters
SETS = {"8 x r16": [16] * 8, "32 x r16": [16] * 32, "8 x r8..64": [8, 16, 32, 64] * 2, "8 x r64": [64] * 8}


def write_adapter(folder: Path, rank: int, seed: int, layers: int) -> Path:
    """A random LoRA on q, k, v and o, as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shapes = gpu_engine.linear_shapes(gpu_engine.LLAMA_7B)
    tensors = {}
    for layer in range(layers):
        for module in ATTENTION:
            out, into = shapes[f"self_attn.{module}"]
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a, b = rng.standard_normal((rank, into)), rng.standard_normal((out, rank))
            tensors[f"{name}.lora_A.weight"] = (a / into**0.5).astype(np.float16)
            tensors[f"{name}.lora_B.weight"] = (0.02 * b).astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": list(ATTENTION),
        "base_model_name_or_path": "dummy-7b",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapters(work: Path, ranks: list[int], layers: int) -> list[Path]:
    found = []
    for seed, rank in enumerate(ranks):
        folder = work / f"r{rank}-{seed}"
        found.append(folder if folder.exists() else write_adapter(folder, rank, seed, layers))
    return found


def measure(llm: Any, requests: list[Any], batch: int) -> dict[str, float]:
    """Milliseconds per output token of a batch whose rows take the adapters in turn."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(37 * i + 11 * j) % 30000 + 5 for j in range(PROMPT_TOKENS)]}
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


def one(kind: str, name: str, work: Path, layers: int) -> None:
    """One engine: prints a JSON line per batch."""
    shape = {**gpu_engine.LLAMA_7B, "num_hidden_layers": layers}
    base = gpu_engine.write_dummy_base(work / "base", shape)
    ranks = SETS.get(name, [])
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 128}
    options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}
    variants = None
    if kind == "ours":
        variants = VariantConfig(len(ranks), 4 << 30, 8 << 30, max(ranks), kinds=("lora",))
    elif kind == "vllm":
        options |= {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": max(ranks)}
    start = time.perf_counter()
    llm = gpu_engine.make_engine(base, variants, **options)
    started_s = time.perf_counter() - start
    requests = []
    if ranks:
        from vllm.lora.request import LoRARequest

        folders = adapters(work, ranks, layers)
        requests = [LoRARequest(f.name, i + 1, str(f)) for i, f in enumerate(folders)]
    for batch in BATCHES:
        print(
            json.dumps(
                {"engine": kind, "set": name, "start_s": round(started_s), **measure(llm, requests, batch)}
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-lora"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sets", default="8 x r16")
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        one(*given.one, given.work, given.layers)
        return
    rows = run(given, "base", "")
    for name in given.sets.split(","):
        adapters(given.work, SETS[name], given.layers)
        rows += run(given, "vllm", name) + run(given, "ours", name)
        given.out.write_text(json.dumps({"command": "python -m benchmarks.gpu_lora", "rows": rows}, indent=1))


def run(given: argparse.Namespace, kind: str, name: str) -> list[dict[str, Any]]:
    arguments = ("--one", kind, name, "--work", str(given.work), "--layers", str(given.layers))
    return gpu_engine.in_own_process("benchmarks.gpu_lora", *arguments, plugins=kind == "ours")


if __name__ == "__main__":
    main()
