"""Configurations of engines for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.messages import EngineConfig, RankConfig

MIB = 2**20


def ranks_of(
    layers_per_stage: Sequence[int], tensor_parallel: int = 1, **part: Any
) -> tuple[RankConfig, ...]:
    """Ranks that all get the same `part` of their devices."""
    budget = {"memory_bytes": 2048 * MIB, "kv_cache_bytes": 256 * MIB, **part}
    return tuple(
        RankConfig(layers=layers, **budget) for layers in layers_per_stage for _ in range(tensor_parallel)
    )


def echo_config(tensor_parallel: int = 1, device_bytes: int = 8, host_bytes: int = 8) -> EngineConfig:
    """Two layers and two slots; `device_bytes` of each rank and `host_bytes` are set aside for variants."""
    part = {"memory_bytes": 1, "kv_cache_bytes": 1, "variant_memory_bytes": device_bytes}
    return EngineConfig(
        engine="echo",
        name="b",
        model_path="/m",
        dtype="float32",
        tensor_parallel=tensor_parallel,
        ranks=ranks_of((2,), tensor_parallel, **part),
        max_model_len=64,
        max_num_seqs=4,
        max_variants=2,
        max_lora_rank=4,
        variant_host_bytes=host_bytes,
        variant_kinds=("lora",),
    )


def vllm_config(folder: Path, ranks: tuple[RankConfig, ...], **more: Any) -> EngineConfig:
    """vLLM with four requests at once, and a slot for a LoRA of rank 16."""
    usual: dict[str, Any] = {
        "dtype": "float32",
        "tensor_parallel": 1,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_variants": 1,
        "max_lora_rank": 16,
        "variant_host_bytes": 64 * MIB,
        "variant_kinds": ("lora",),
    }
    return EngineConfig(engine="vllm", name="base", model_path=str(folder), ranks=ranks, **{**usual, **more})
