"""Serves a Llama-2-7B shape with dummy weights and two LoRAs through our worker, on one GPU.

    python -m benchmarks.gpu_worker --folder /tmp/gpu-worker --out RESULT.json

Everything but the gateway: a checkpoint and adapters in files, the plan from `candidate_plans`, its estimate
from rates measured on the GPU, the engine through `workers.server.worker.Worker`, requests through its OpenAI
application, variants checked by `profiler.variants`. Reports times and memory, and whether base and variants
share one engine correctly: each streamed answer in the mixed batch against the same request alone (bfloat16:
the share of equal tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import gpu_engine, rehearsing
from profiler.checkpoint import read_model
from profiler.plans import candidate_plans
from profiler.roofline import estimate
from profiler.types import CPU, DeviceRates, Estimate, ModelSpec, Plan, Workload
from profiler.variants.reading import read_variant
from profiler.variants.types import VariantLimits
from workers.agent.device_rates import probe
from workers.messages import EngineCall, EngineConfig, EngineHead, RankConfig, VariantRef
from workers.server.worker import Worker

RANK, INPUT_TOKENS = 16, 64
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
BATCHES, CONCURRENCY = (1, 8, 32), 32
BASE = "dummy-7b"
MIB = 2**20
ON_CPU = {"TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Size:
    """A Llama's, as config.json names it; what is asked of it; and what serves it.

    `memory_bytes` is what the engine may take; None: what the plan's estimate says. `adapters_deviation` is
    that of a LoRA's B.
    """

    shape: dict[str, int]
    output_tokens: int = 128
    repeats: int = 3
    dtype: str = "bfloat16"
    device_kind: str = "nvidia-h200"
    memory_bytes: int | None = None
    adapters_deviation: float = 0.3


LLAMA_7B = Size({**gpu_engine.LLAMA_7B, "vocab_size": 49152})
REHEARSED = Size(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    output_tokens=6,
    repeats=1,
    dtype="float32",
    device_kind=CPU,
    memory_bytes=2048 * MIB,  # an engine on a CPU takes some, however small its model
    adapters_deviation=3.0,  # two layers of vLLM's tiny dummy weights hide smaller ones
)


def write_model(folder: Path, tokenizer: Path | None, size: Size) -> Path:
    """A checkpoint that the engine reads shapes from; it makes the weights itself (`load_format` dummy).

    Without the folder of a tokenizer it has one that knows a word for each id.
    """
    gpu_engine.write_dummy_base(folder, size.shape)
    if tokenizer is None:
        return folder
    for path in tokenizer.iterdir():
        if path.is_file() and path.name != "config.json" and "safetensors" not in path.name:
            shutil.copy(path, folder)
    return folder


def write_adapter(
    folder: Path, seed: int, size: Size, rank: int = RANK, modules: Collection[str] = ADAPTED
) -> Path:
    """A random LoRA on some modules, q, k, v and o if left out, as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    shapes = gpu_engine.linear_shapes(size.shape)
    for layer in range(size.shape["num_hidden_layers"]):
        for module, (out, inner) in shapes.items():
            if module.split(".")[1] not in modules:
                continue
            name = f"base_model.model.model.layers.{layer}.{module}"
            a = rng.standard_normal((rank, inner), np.float32) / inner**0.5
            b = size.adapters_deviation * rng.standard_normal((out, rank), np.float32)
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float16)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": list(modules),
        "base_model_name_or_path": BASE,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_plan(spec: ModelSpec, concurrency: int) -> Plan:
    return candidate_plans(spec, ("none",), 1, 2048, concurrency, 4, RANK)[0]


def engine_config(
    spec: ModelSpec, plan: Plan, predicted: Estimate, folder: Path, concurrency: int, size: Size
) -> EngineConfig:
    return EngineConfig(
        engine="vllm",
        name=BASE,
        model_path=str(folder),
        dtype=size.dtype,
        tensor_parallel=1,
        ranks=(
            RankConfig(
                layers=spec.num_layers,
                memory_bytes=size.memory_bytes or predicted.memory_bytes[0],
                kv_cache_bytes=plan.kv_cache_tokens * spec.kv_bytes_per_token_per_layer * spec.num_layers,
                variant_memory_bytes=160 * MIB,  # more than both adapters take
                device_kind=size.device_kind,
            ),
        ),
        max_model_len=plan.max_model_len,
        max_num_seqs=concurrency,
        max_variants=plan.max_variants,
        variant_host_bytes=1 << 30,
        variant_kinds=("lora",),
        max_lora_rank=plan.max_lora_rank,
        load_format="dummy",
    )


async def ask(worker: Worker, variant: VariantRef | None, seed: int, salt: str, size: Size) -> dict[str, Any]:
    """One streamed completion: its token ids and times."""
    rng = np.random.default_rng(seed)
    prompt = [int(t) for t in rng.integers(100, size.shape["vocab_size"] - 100, INPUT_TOKENS)]
    body = {
        "model": variant.name if variant else BASE,
        "prompt": prompt,
        "max_tokens": size.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    times: list[float] = []
    tokens: list[int] = []
    start = time.perf_counter()
    call = EngineCall("/v1/completions", json.dumps(body).encode(), variant)
    async for item in worker.stream(call):
        if isinstance(item, EngineHead):
            assert item.status == 200, item
            continue
        for line in item.decode().splitlines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            times.append(time.perf_counter() - start)
    assert len(tokens) == size.output_tokens, tokens
    return {"tokens": tokens, "ttft_s": times[0], "tpot_s": (times[-1] - times[0]) / (size.output_tokens - 1)}


async def measure(
    worker: Worker, variants: Sequence[VariantRef | None], batch: int, size: Size
) -> dict[str, Any]:
    """`batch` requests at once, spread over `variants`; medians over all requests and repeats."""
    found: list[dict[str, Any]] = []
    for repeat in range(size.repeats + 1):
        jobs = [ask(worker, variants[i % len(variants)], i, f"{batch}-{repeat}", size) for i in range(batch)]
        answers = await asyncio.gather(*jobs)
        if repeat:  # the first warms up
            found += answers
    return {
        "batch": batch,
        "models": [v.name if v else "base" for v in variants],
        "ttft_ms": 1e3 * statistics.median(a["ttft_s"] for a in found),
        "tpot_ms": 1e3 * statistics.median(a["tpot_s"] for a in found),
    }


async def agreement(worker: Worker, variants: list[VariantRef | None], size: Size) -> dict[str, float]:
    """Share of leading tokens that a request in the mixed batch has in common with itself alone."""
    jobs = [(variant, seed) for seed in range(4) for variant in variants]
    together = await asyncio.gather(*(ask(worker, v, s, "together", size) for v, s in jobs))
    result: dict[str, list[float]] = {}
    for (variant, seed), mixed in zip(jobs, together, strict=True):
        alone = await ask(worker, variant, seed, "alone", size)
        same = next(
            (i for i, (a, b) in enumerate(zip(mixed["tokens"], alone["tokens"], strict=True)) if a != b),
            size.output_tokens,
        )
        result.setdefault(variant.name if variant else "base", []).append(same / size.output_tokens)
    firsts = {v.name if v else "base": together[i]["tokens"] for i, v in enumerate(variants)}
    distinct = len({tuple(tokens) for tokens in firsts.values()}) == len(variants)
    return {name: statistics.mean(shares) for name, shares in result.items()} | {
        "variants_differ": float(distinct)
    }


async def run(folder: Path, tokenizer: Path | None, size: Size) -> dict[str, Any]:
    device = probe("gpu-host").devices[0]
    rates = DeviceRates(device.memory_bytes_per_s, device.flops_per_s)
    model = write_model(folder / "model", tokenizer, size)
    spec = read_model(model)
    plan = make_plan(spec, CONCURRENCY)
    predicted = estimate(spec, plan, [rates], Workload(1, INPUT_TOKENS, size.output_tokens), 100.0)
    paths = [write_adapter(folder / name, seed, size) for seed, name in enumerate(("lora-a", "lora-b"), 1)]
    checked = [read_variant(path, spec, VariantLimits(RANK)) for path in paths]
    worker = Worker(engine_config(spec, plan, predicted, model, CONCURRENCY, size), "127.0.0.1")
    start = time.perf_counter()
    await worker.start()
    started_s = time.perf_counter() - start
    variants: list[VariantRef | None] = [
        None,
        *(VariantRef(p.name, i + 1, str(p)) for i, p in enumerate(paths)),
    ]
    loads_s = []
    for variant in variants[1:]:
        start = time.perf_counter()
        assert variant is not None
        await worker.load_variant(variant)
        loads_s.append(time.perf_counter() - start)
    rows = []
    for models in ([None], variants):
        for batch in BATCHES:
            rows.append(await measure(worker, models, batch, size))
    report = await worker.report()
    result = {
        "device": device.kind,
        "measured_memory_gb_per_s": rates.memory_bytes_per_s / 1e9,
        "measured_bf16_tflops": rates.flops_per_s / 1e12,
        "engine_version": report.engine_version,
        "shape": f"Llama-2-7B with a vocabulary of {spec.vocab_size}, dummy weights, {size.dtype}",
        "adapters": [f"r{a.max_rank} on {', '.join(a.target_modules)}" for a in checked],
        "input_tokens": INPUT_TOKENS,
        "output_tokens": size.output_tokens,
        "engine_start_s": started_s,
        "adapter_load_s": loads_s,
        "predicted_batch_1": {"ttft_ms": 1e3 * predicted.ttft_s, "tpot_ms": 1e3 * predicted.tpot_s},
        "rows": rows,
        "leading_tokens_equal_alone_and_in_batch": await agreement(worker, variants, size),
    }
    await worker.close()
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer; without it one is made")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    size = REHEARSED if rehearsing.is_rehearsal() else LLAMA_7B
    result = asyncio.run(run(args.folder, args.tokenizer, size))
    rehearsing.write_result(args.out, result)
    print(json.dumps(result, indent=1))


def rehearse(folder: Path) -> None:
    """All of it on a tiny model and vLLM's CPU engine, in a process of its own."""
    out = folder / "worker.json"
    command = [sys.executable, "-m", "benchmarks.gpu_worker", "--folder", str(folder), "--out", str(out)]
    # What tests of kernels set is not for an engine.
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(command, check=True, env={**ON_CPU, **inherited}, cwd=Path(__file__).parents[1])
    record = rehearsing.check(out, "rows", "adapters", "adapter_load_s", "predicted_batch_1")
    assert record["engine_version"] != "echo"
    assert len(record["rows"]) == 2 * len(BATCHES)
    agreed = record["leading_tokens_equal_alone_and_in_batch"]
    assert set(agreed) == {"base", "lora-a", "lora-b", "variants_differ"}
    assert agreed["variants_differ"], "the adapters change nothing: they were not loaded"


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
