"""Serves a Llama-2-7B shape with dummy weights and two LoRAs through our worker, on one GPU.

    python -m benchmarks.gpu_worker --folder /tmp/gpu-worker --tokenizer TOKENIZER_FOLDER --out RESULT.json

Everything but the gateway: the plan from `candidate_plans`, its estimate from rates measured on the GPU,
the engine through `workers.server.worker.Worker`, requests through its OpenAI application, variants checked
by `profiler.variants`. Reports times and memory, and whether base and variants share one engine correctly:
each streamed answer in the mixed batch against the same request alone (bfloat16: the share of equal tokens).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from benchmarks import rehearsing
from profiler.plans import candidate_plans
from profiler.roofline import estimate
from profiler.types import DeviceRates, Estimate, ModelSpec, Plan, Workload
from profiler.variants.reading import read_variant
from profiler.variants.types import VariantLimits
from workers.agent.device_rates import probe
from workers.messages import EngineCall, EngineConfig, EngineHead, RankConfig, VariantRef
from workers.server.worker import Worker

RANK, INPUT_WORDS, OUTPUT_TOKENS = 16, 64, 128
BATCHES, REPEATS, CONCURRENCY = (1, 8, 32), 3, 32


@dataclass(frozen=True)
class Size:
    """Of a Llama, and what serves it."""

    hidden: int = 4096
    intermediate: int = 11008
    layers: int = 32
    heads: int = 32
    vocab: int = 49152
    engine: Literal["vllm", "echo"] = "vllm"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        square = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (self.hidden, self.hidden))
        up = dict.fromkeys(("gate_proj", "up_proj"), (self.intermediate, self.hidden))
        return {**square, **up, "down_proj": (self.hidden, self.intermediate)}


REHEARSED = Size(hidden=64, intermediate=96, layers=2, heads=4, vocab=512, engine="echo")


def write_model(folder: Path, tokenizer: Path, size: Size) -> Path:
    """Config and tokenizer; the engine makes the weights (`load_format` dummy)."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def spec(size: Size) -> ModelSpec:
    layer = sum(o * i for o, i in size.linears.values()) + 2 * size.hidden
    return ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=size.hidden // size.heads,
        vocab_size=size.vocab,
        max_position=4096,
        dtype_bytes=2,
        layer_weight_bytes=2 * layer,
        other_weight_bytes=2 * (2 * size.vocab * size.hidden + size.hidden),
        linear_shapes=size.linears,
    )


def write_adapter(folder: Path, seed: int, size: Size) -> Path:
    """A random LoRA on q, k, v and o, as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(size.layers):
        for module in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out, inner = size.linears[module]
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = (rng.standard_normal((RANK, inner)) / inner**0.5).astype(
                np.float16
            )
            tensors[f"{name}.lora_B.weight"] = (0.3 * rng.standard_normal((out, RANK))).astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "base_model_name_or_path": "dummy-7b",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_plan(concurrency: int, size: Size) -> Plan:
    plans = candidate_plans(spec(size), ("none",), 1, 2048, concurrency, 4, RANK)
    return plans[0]


def engine_config(
    plan: Plan, predicted: Estimate, folder: Path, concurrency: int, size: Size
) -> EngineConfig:
    return EngineConfig(
        engine=size.engine,
        name="dummy-7b",
        model_path=str(folder),
        dtype="bfloat16",
        tensor_parallel=1,
        ranks=(
            RankConfig(
                layers=size.layers,
                memory_bytes=predicted.memory_bytes[0],
                kv_cache_bytes=plan.kv_cache_tokens * spec(size).kv_bytes_per_token_per_layer * size.layers,
                variant_memory_bytes=64 << 20,
                device_kind="nvidia-h200",
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


async def ask(worker: Worker, variant: VariantRef | None, seed: int, salt: str, vocab: int) -> dict[str, Any]:
    """One streamed completion: its token ids and times."""
    rng = np.random.default_rng(seed)
    prompt = [int(t) for t in rng.integers(100, vocab - 100, INPUT_WORDS)]
    body = {
        "model": variant.name if variant else "dummy-7b",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
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
    return {"tokens": tokens, "ttft_s": times[0], "tpot_s": (times[-1] - times[0]) / (OUTPUT_TOKENS - 1)}


async def measure(
    worker: Worker, variants: Sequence[VariantRef | None], batch: int, repeats: int, vocab: int
) -> dict[str, Any]:
    """`batch` requests at once, spread over `variants`; medians over all requests and repeats."""
    found: list[dict[str, Any]] = []
    for repeat in range(repeats + 1):
        jobs = [ask(worker, variants[i % len(variants)], i, f"{batch}-{repeat}", vocab) for i in range(batch)]
        answers = await asyncio.gather(*jobs)
        if repeat:  # the first warms up
            found += answers
    return {
        "batch": batch,
        "models": [v.name if v else "base" for v in variants],
        "ttft_ms": 1e3 * statistics.median(a["ttft_s"] for a in found),
        "tpot_ms": 1e3 * statistics.median(a["tpot_s"] for a in found),
    }


async def agreement(worker: Worker, variants: list[VariantRef | None], vocab: int) -> dict[str, float]:
    """Share of leading tokens that a request in the mixed batch has in common with itself alone."""
    jobs = [(variant, seed) for seed in range(4) for variant in variants]
    together = await asyncio.gather(*(ask(worker, v, s, "together", vocab) for v, s in jobs))
    result: dict[str, list[float]] = {}
    for (variant, seed), mixed in zip(jobs, together, strict=True):
        alone = await ask(worker, variant, seed, "alone", vocab)
        same = next(
            (i for i, (a, b) in enumerate(zip(mixed["tokens"], alone["tokens"], strict=True)) if a != b),
            OUTPUT_TOKENS,
        )
        result.setdefault(variant.name if variant else "base", []).append(same / OUTPUT_TOKENS)
    firsts = {v.name if v else "base": together[i]["tokens"] for i, v in enumerate(variants)}
    distinct = len({tuple(tokens) for tokens in firsts.values()}) == len(variants)
    return {name: statistics.mean(shares) for name, shares in result.items()} | {
        "variants_differ": float(distinct)
    }


async def run(folder: Path, tokenizer: Path, size: Size) -> dict[str, Any]:
    device = probe("gpu-host").devices[0]
    rates = DeviceRates(device.memory_bytes_per_s, device.flops_per_s)
    plan = make_plan(CONCURRENCY, size)
    predicted = estimate(spec(size), plan, [rates], Workload(1, INPUT_WORDS, OUTPUT_TOKENS), 100.0)
    model = write_model(folder / "model", tokenizer, size)
    paths = [write_adapter(folder / name, seed, size) for seed, name in enumerate(("lora-a", "lora-b"), 1)]
    checked = [read_variant(path, spec(size), VariantLimits(RANK)) for path in paths]
    worker = Worker(engine_config(plan, predicted, model, CONCURRENCY, size), "127.0.0.1")
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
            rows.append(await measure(worker, models, batch, REPEATS, size.vocab))
    report = await worker.report()
    result = {
        "device": device.kind,
        "measured_memory_gb_per_s": rates.memory_bytes_per_s / 1e9,
        "measured_bf16_tflops": rates.flops_per_s / 1e12,
        "engine_version": report.engine_version,
        "shape": f"Llama-2-7B with a vocabulary of {size.vocab}, dummy weights, bfloat16",
        "adapters": [f"r{a.max_rank} on {', '.join(a.target_modules)}" for a in checked],
        "input_tokens": INPUT_WORDS,
        "output_tokens": OUTPUT_TOKENS,
        "engine_start_s": started_s,
        "adapter_load_s": loads_s,
        "predicted_batch_1": {"ttft_ms": 1e3 * predicted.ttft_s, "tpot_ms": 1e3 * predicted.tpot_s},
        "rows": rows,
        "leading_tokens_equal_alone_and_in_batch": await agreement(worker, variants, size.vocab),
    }
    await worker.close()
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    size = REHEARSED if rehearsing.is_rehearsal() else Size()
    result = asyncio.run(run(args.folder, args.tokenizer, size))
    rehearsing.write_result(args.out, result)
    print(json.dumps(result, indent=1))


def rehearse(folder: Path) -> None:
    """A tiny model's plan and estimate, its adapters, and a worker whose engine echoes."""
    tokenizer, out = folder / "tokenizer", folder / "worker.json"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    main(["--folder", str(folder), "--tokenizer", str(tokenizer), "--out", str(out)])
    record = rehearsing.check(out, "rows", "adapters", "predicted_batch_1")
    assert len(record["rows"]) == 2 * len(BATCHES)
    assert set(record["leading_tokens_equal_alone_and_in_batch"]) >= {"base", "lora-a", "lora-b"}


if __name__ == "__main__":
    rehearsing.run(main, rehearse)
