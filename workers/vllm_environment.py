"""What vLLM reads from the environment and nowhere else."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence


def set_environment(layers_per_stage: Sequence[int], tensor_parallel: int, kv_cache_bytes: int) -> None:
    """For an engine that this process will start; its ranks inherit it."""
    gib = max(1, math.ceil(kv_cache_bytes / 2**30))
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(gib),
        VLLM_PP_LAYER_PARTITION=",".join(map(str, layers_per_stage)),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_HOST_IP="127.0.0.1",  # an engine's ranks are on one node
        HF_HUB_OFFLINE="1",
    )
    if len(layers_per_stage) == 1:
        del os.environ["VLLM_PP_LAYER_PARTITION"]
    if tensor_parallel * len(layers_per_stage) > 1:
        # vLLM binds each rank to a NUMA node of its own, and refuses when there are fewer nodes.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
