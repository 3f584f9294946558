"""The Ray Serve application `ostinato`: the gateway (ingress, any number of replicas) and the controller.

serve run controlplane.app:build
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from controlplane import serve_runtime
from controlplane.agents import AgentBook
from controlplane.api.app import create_app
from controlplane.api.services import RouteBook, Services
from controlplane.controller import Controller
from controlplane.engine_client import EngineClient
from controlplane.inventory import NodeState, inventory_of
from controlplane.metrics import ControllerMetrics, Metrics
from controlplane.ray_on_loopback import keep_replica_on_loopback
from controlplane.reconcile import EngineView
from controlplane.settings import Settings
from controlplane.state import open_store
from controlplane.state.typed import Repository
from placement.types import Inventory
from workers.measuring.order import MeasureOrder
from workers.messages import (
    EngineCall,
    EngineConfig,
    EngineHead,
    EngineReply,
    EngineResidency,
    VariantRef,
    WorkerReport,
)
from workers.metrics_server import serve_metrics

log = logging.getLogger(__name__)


class ServeRuntime:
    """The cluster, as the controller and the gateway see it: `serve_runtime` with its settings.

    That of the controller starts the nodes' agents.
    """

    def __init__(self, settings: Settings, starts_agents: bool = False) -> None:
        self._settings = settings
        self._agents = AgentBook(settings, starts_agents)
        self._requests = EngineClient(serve_runtime.find_workers, settings.max_queued_requests)

    async def launch(self, config: EngineConfig) -> None:
        await serve_runtime.launch(config, self._settings)

    async def stop(self, host: str) -> None:
        await serve_runtime.stop(host)
        serve_runtime.forget_handle(host)

    async def observe(self) -> dict[str, EngineView]:
        return dict(await serve_runtime.observe())

    async def load_variant(self, host: str, variant: VariantRef) -> None:
        await serve_runtime.load_variant(host, variant)

    async def unload_variant(self, host: str, variant: VariantRef) -> None:
        await serve_runtime.unload_variant(host, variant)

    async def keep_agents(self) -> None:
        await self._agents.keep()

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        return await self._agents.nodes(wait)

    async def inventory(self) -> Inventory:
        return inventory_of(await self._agents.nodes())

    def measure(self, order: MeasureOrder, node: str) -> AsyncGenerator[str, None]:
        return serve_runtime.measure(order, node)

    def convert_bundled(self, name: str) -> Path:
        return serve_runtime.convert_bundled(name, self._settings.home / "models")

    async def call(self, host: str, request: EngineCall) -> EngineReply:
        return await self._requests.call(host, request)

    def stream(self, host: str, request: EngineCall) -> AsyncGenerator[EngineHead | bytes, None]:
        return self._requests.stream(host, request)

    async def reports(self, host: str) -> list[WorkerReport]:
        return await serve_runtime.reports(host)

    async def residency(self, host: str) -> list[EngineResidency]:
        return await serve_runtime.residency(host)

    async def limit_variants(self, host: str, limit: int) -> None:
        await serve_runtime.limit_variants(host, limit)

    async def prefetch(self, host: str, variant: VariantRef) -> None:
        await serve_runtime.prefetch(host, variant)

    async def logs(self, host: str, lines: int) -> str:
        return await serve_runtime.logs(host, lines)

    async def metrics_targets(self) -> list[tuple[str, str]]:
        return await serve_runtime.metrics_targets()


def make_services() -> Services:
    """The gateway's services from the process's environment."""
    settings = Settings()
    repository = Repository(open_store(settings.resolved_store_url))
    return Services(settings, repository, RouteBook(repository), ServeRuntime(settings), Metrics())


def make_app() -> FastAPI:
    return create_app(make_services)


@serve.deployment(
    name="Gateway",
    max_ongoing_requests=1000,
    health_check_period_s=2,
    logging_config=LoggingConfig(enable_access_log=False),  # a line costs; metrics count requests
)
@serve.ingress(make_app)
class Gateway:
    """Stateless: each replica reads the same records and routes alike."""

    def __init__(self, controller: DeploymentHandle) -> None:
        keep_replica_on_loopback()
        self._controller = controller  # keeps the controller in this application
        self._metrics_address = serve_metrics(Settings().metrics_host)

    async def metrics_address(self) -> str:
        return self._metrics_address


@serve.deployment(name="Controller", num_replicas=1, health_check_period_s=2)
class ControllerReplica:
    """Runs one Controller for as long as the replica lives."""

    def __init__(self) -> None:
        keep_replica_on_loopback()
        settings = Settings()
        repository = Repository(open_store(settings.resolved_store_url))
        self._metrics_address = serve_metrics(settings.metrics_host)
        runtime = ServeRuntime(settings, starts_agents=True)
        controller = Controller(settings, repository, runtime, ControllerMetrics())
        loop = asyncio.get_running_loop()
        self._tasks = (loop.create_task(controller.run()), loop.create_task(runtime.keep_agents()))

    async def metrics_address(self) -> str:
        return self._metrics_address

    async def check_health(self) -> None:
        """A controller one of whose loops ended is replaced."""
        for task in self._tasks:
            if task.done():
                with suppress(asyncio.CancelledError):
                    raise RuntimeError("a loop of the controller ended") from task.exception()


def build(args: dict[str, Any] | None = None) -> serve.Application:
    """The application; `args` are those of a Serve config file (`gateway_replicas` only)."""
    replicas = int((args or {}).get("gateway_replicas") or Settings().gateway_replicas)
    controller = ControllerReplica.options(ray_actor_options={"num_cpus": 0.1})  # type: ignore[attr-defined]
    gateway = Gateway.options(num_replicas=replicas, ray_actor_options={"num_cpus": 0.1})  # type: ignore[attr-defined]
    application: serve.Application = gateway.bind(controller.bind())
    return application
