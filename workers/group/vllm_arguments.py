"""vLLM's arguments, from the plan of a worker group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.checkpoint import has_own_head
from profiler.files import is_file
from profiler.quantization import UNCOMPRESSED, engine_name
from workers.group.cuda_graphs import compilation
from workers.group.vllm_entrypoints import entrypoints
from workers.messages import EngineConfig
from workers.variant_config import VariantConfig

SCHEDULER = "workers.engine.scheduler.make_scheduler"
# For models with an unknown format of tool calls (`workers.engine.chat_parsers` registers it in vLLM).
FORCED_TOOLS = "ostinato_forced_tools"
RANK_PLUGIN = "workers.rank_plugin.PluggedIn"
CPU_RANK = "workers.group.cpu.PlannedCpuRank"
GPU_RANK = "workers.group.gpu.PlannedGpuRank"
FROM_FILES = "auto"  # the weights' format; with other formats vLLM makes the weights up
# The ranks that vLLM's own configuration accepts; ours has no such steps, but its check requires one of them.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def engine_arguments(config: EngineConfig, network: Mapping[str, str | int] | None = None) -> list[str]:
    """The command line of vLLM's own server for this configuration.

    `network` are the arguments that distinguish the members of a group on several nodes. Every rank replaces
    its share of memory by its own, see `workers.group.rank`.
    """
    batched_tokens = max(config.max_batched_tokens, config.max_num_seqs)
    arguments = {
        "--model": config.model_path,
        "--served-model-name": config.name,
        "--dtype": config.dtype,
        "--load-format": config.load_format,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": batched_tokens,
        "--tensor-parallel-size": config.tensor_parallel,
        "--pipeline-parallel-size": len(config.layers_per_stage),
        "--kv-cache-memory-bytes": config.ranks[0].kv_cache_bytes,
        "--worker-cls": GPU_RANK if config.on_gpu else CPU_RANK,
        "--tool-call-parser": config.tool_parser or FORCED_TOOLS,
        **({"--reasoning-parser": config.reasoning_parser} if config.reasoning_parser else {}),
        **(
            {"--quantization": engine_name(config.quantization)}
            if config.quantization != UNCOMPRESSED
            else {}
        ),
        **({"--distributed-executor-backend": "mp"} if len(config.ranks) > 1 else {}),
        **(network or {}),
    }
    if _has_own_head(config):
        arguments["--hf-overrides"] = json.dumps({"tie_word_embeddings": False})
    if config.max_variants:
        arguments |= {
            "--max-loras": config.max_variants,
            "--max-lora-rank": slot_rank(config.max_lora_rank),
            "--scheduler-cls": SCHEDULER,
            "--worker-extension-cls": RANK_PLUGIN,
            "--additional-config": json.dumps(variant_config(config).as_json()),
        }
    if config.on_gpu:
        chosen = compilation(config.tensor_parallel, config.max_num_seqs, batched_tokens)
        arguments["--compilation-config"] = json.dumps(chosen)
    flat = [str(part) for pair in arguments.items() for part in pair]
    logging_flag = "--enable-log-requests" if config.log_requests else "--no-enable-log-requests"
    # vLLM refuses to start with adapters if it has none for the architecture.
    adapters = ["--enable-lora"] if config.max_variants else []
    return [*flat, *adapters, "--enable-auto-tool-choice", "--disable-fastapi-docs", logging_flag]


def _has_own_head(config: EngineConfig) -> bool:
    """Whether the model's files hold a head that its config denies: vLLM 0.26 uses the config alone."""
    folder = Path(config.model_path)
    return config.load_format == FROM_FILES and is_file(folder / "config.json") and has_own_head(folder)


def vllm_arguments(config: EngineConfig, network: Mapping[str, str | int]) -> Any:
    """The same arguments as vLLM's AsyncEngineArgs, for a member of a group without the engine."""
    vllm = entrypoints()
    return vllm["AsyncEngineArgs"].from_cli_args(vllm["parse"](engine_arguments(config, network)))


def variant_config(config: EngineConfig) -> VariantConfig:
    """The configuration for the largest rank; each rank takes its own part (`workers.variants.manager`)."""
    return VariantConfig(
        slots=config.max_variants,
        arena_bytes=max(rank.variant_memory_bytes for rank in config.ranks),
        host_bytes=config.variant_host_bytes,
        max_rank=config.max_lora_rank,
        kinds=config.variant_kinds,
        merged_slot=config.merged_slot,
    )


def slot_rank(rank: int) -> int:
    """The smallest rank for which vLLM allocates slots that holds `rank`. Raises ValueError above 512."""
    for allowed in _VLLM_RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(f"expected a LoRA rank of at most {_VLLM_RANKS[-1]}, which vLLM supports, got {rank}")
