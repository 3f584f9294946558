"""Configurations of engines for tests."""

from __future__ import annotations

from collections.abc import Sequence
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
