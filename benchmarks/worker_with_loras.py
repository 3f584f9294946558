"""A Llama shape with dummy weights, LoRAs, and streamed requests to a worker that serves them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks import gpu_engine
from profiler.types import CPU
from workers.messages import EngineCall, EngineHead, VariantRef
from workers.server.worker import Worker

RANK, INPUT_TOKENS = 16, 64
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
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


async def ask(
    worker: Worker, variant: VariantRef | None, seed: int, salt: str, size: Size, request_id: str = ""
) -> dict[str, Any]:
    """One streamed completion: its token ids and times. vLLM makes the id up if none is given."""
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
        **({"request_id": request_id} if request_id else {}),
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
    more = max(1, size.output_tokens - 1)
    return {"tokens": tokens, "ttft_s": times[0], "tpot_s": (times[-1] - times[0]) / more}
