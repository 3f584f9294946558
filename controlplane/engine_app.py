"""The Serve application around one worker: how many processes, on what, and when they count as ill."""

from __future__ import annotations

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from controlplane.ray_on_loopback import keep_replica_on_loopback
from controlplane.settings import Settings
from workers.messages import EngineConfig, EngineResidency, VariantRef, WorkerReport
from workers.worker import Worker

ENGINE = "Engine"

# Serve retries a constructor 20 times by default; a model that cannot start should say so soon.
START_ATTEMPTS = 2


class EngineReplica:
    """Ray Serve's face of a worker: one method per message, no logic. Requests go to the worker's door."""

    async def __init__(self, config: EngineConfig, metrics_host: str, worker_host: str) -> None:  # type: ignore[misc]  # Serve awaits it
        keep_replica_on_loopback()
        self._worker = Worker(config, metrics_host)
        await self._worker.start()
        await self._worker.open_door(worker_host, ray.util.get_node_ip_address())

    async def load_variant(self, variant: VariantRef) -> None:
        await self._worker.load_variant(variant)

    async def unload_variant(self, variant: VariantRef) -> None:
        await self._worker.unload_variant(variant)

    async def prefetch(self, variant: VariantRef) -> None:
        await self._worker.prefetch(variant)

    async def limit_variants(self, limit: int) -> int:
        return await self._worker.limit_variants(limit)

    async def residency(self) -> EngineResidency:
        return await self._worker.residency()

    async def report(self) -> WorkerReport:
        return await self._worker.report()

    async def logs(self, lines: int, folder: str) -> str:
        return await self._worker.logs(lines, folder)

    async def check_health(self) -> None:
        await self._worker.check_health()

    async def __del__(self) -> None:
        """Serve awaits it when it stops a replica; requests that run then may end."""
        await self._worker.close()


def engine_application(config: EngineConfig, settings: Settings) -> serve.Application:
    """The application for one base model. GPUs are one per rank; a CPU engine takes what settings say."""
    ranks = config.tensor_parallel * len(config.layers_per_stage)
    on_gpu = config.device_kind != "cpu"
    deployment = serve.deployment(EngineReplica).options(
        name=ENGINE,
        num_replicas=1,
        max_ongoing_requests=config.max_ongoing_requests,
        max_constructor_retry_count=START_ATTEMPTS,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=20,
        logging_config=LoggingConfig(enable_access_log=False),  # the gateway logs and counts requests
        ray_actor_options={
            "num_cpus": 0 if on_gpu else settings.engine_num_cpus,
            "num_gpus": ranks if on_gpu else 0,
        },
    )
    return deployment.bind(config, settings.metrics_host, settings.worker_host)
