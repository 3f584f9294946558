"""The two engines: vLLM with the same flags; only what a variant is differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_engine
from benchmarks.serving import deltas
from benchmarks.serving.settings import GIB, Settings, SwapConfig
from workers.bus.client import new_address
from workers.group.cuda_graphs import compilation
from workers.kernels import full
from workers.variant_config import ADDRESS_VARIABLE, VariantConfig

ARENA_SLACK = 1.01  # a variant's arrays are aligned in the arena


def prepare_files(settings: Settings, engine: str) -> list[Path]:
    """The base, and for ours distinct deltas of it on disk; where variants lie, in turn."""
    base = gpu_engine.write_dummy_base(settings.work / "base", settings.shape)
    if engine == "baseline":
        return [base]
    return [
        deltas.write(
            base, settings.shape, settings.work / f"delta-{settings.bits}bit-{number}", settings.bits, number
        )
        for number in range(settings.payloads)
    ]


def delta_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def options(settings: Settings, engine: str) -> dict[str, Any]:
    """vLLM's arguments."""
    common: dict[str, Any] = {
        "model": str(settings.work / "base"),
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "disable_log_stats": True,
        "enable_lora": True,
        "max_lora_rank": 8,  # vLLM wants one; neither side has LoRAs
        "compilation_config": compilation(1, settings.max_num_seqs, settings.max_batched_tokens),
    }
    if torch.cuda.is_available():
        common |= {
            "kv_cache_memory_bytes": int(settings.kv_gib * GIB),
            "gpu_memory_utilization": 0.95,
        }
    return common | (ours(settings) if engine == "ours" else baseline(settings))


def ours(settings: Settings) -> dict[str, Any]:
    rows, columns = settings.shape["vocab_size"], settings.shape["hidden_size"]
    embedding = sum(part.size_bytes for part in full.difference_parts(rows, columns))  # stays in host memory
    size = delta_bytes(settings.work / f"delta-{settings.bits}bit-0") - embedding
    arena = int(settings.slots * size * ARENA_SLACK) + (64 << 20)
    config = VariantConfig(settings.slots, arena, int(settings.host_gib * GIB), 8, kinds=("sparse_delta",))
    return {
        "max_loras": settings.slots,
        "scheduler_cls": "workers.engine.scheduler.make_scheduler",
        "additional_config": config.as_json(),
    }


def baseline(settings: Settings) -> dict[str, Any]:
    config = VariantConfig(settings.resident, 0, 0, 8, kinds=("sparse_delta",))
    own = SwapConfig(settings.host_copies, settings.quantum)
    return {
        "max_loras": settings.resident,
        "scheduler_cls": "benchmarks.serving.turns.make_scheduler",
        "worker_cls": "benchmarks.serving.whole_models.WholeModelWorker",
        "additional_config": {**config.as_json(), **own.as_json()},
    }


def set_environment() -> None:
    """Before vLLM is imported; its processes inherit it."""
    os.environ.update(
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
    )
    os.environ[ADDRESS_VARIABLE] = new_address()


def start(settings: Settings, engine: str) -> Any:
    """vLLM's AsyncLLM, in whose engine process everything happens."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options(settings, engine)))
