"""The Ray Serve application `ostinato`: the gateway (ingress, any number of replicas) and the controller.

serve run controlplane.runtime.app:build
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from functools import cache
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client import REGISTRY
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from workers.imports import uncollected

with uncollected():
    from controlplane.api.app import create_app, inference_only
    from controlplane.api.early_refusal import EarlyRefusal
    from controlplane.api.services import Services
    from controlplane.controller.controller import Controller
    from controlplane.controller.leadership import Leadership
    from controlplane.controller.metrics import ControllerMetrics
    from controlplane.gateway import warming
    from controlplane.gateway.audit import AuditLog
    from controlplane.gateway.metrics import Metrics
    from controlplane.gateway.queue_metrics import QueueMetrics
    from controlplane.gateway.rate_book import LARGE_BODY_BYTES, RateBook
    from controlplane.gateway.rate_sharing import RateReport, keep_sharing
    from controlplane.gateway.route_book import RouteBook
    from controlplane.gateway.tenants_book import TenantsBook
    from controlplane.runtime import start_checks
    from controlplane.runtime.front_door import environment
    from controlplane.runtime.loopback import keep_replica_on_loopback
    from controlplane.runtime.patches.ray.serve_news import keep_asking
    from controlplane.runtime.ray_cluster import RayCluster
    from controlplane.runtime.replica_http import answer_first
    from controlplane.runtime.replica_logs import log_at_once
    from controlplane.runtime.serve import answers_of, installations, own_handle
    from controlplane.runtime.step_models import StepModelBook
    from controlplane.settings import Settings
    from controlplane.state.repository import Repository
    from controlplane.state.stores import open_store_at_start
    from workers.server.metrics_server import serve_metrics

log = logging.getLogger(__name__)

RATES_TIMEOUT_S = 2.0
# Requests leave no cyclic garbage, but have more objects at a time than Python's default of 700, after which
# it would look for garbage again and again.
COLLECT_AFTER = 10_000


@cache
def _repository() -> Repository:
    """The gateway's repository. This function and the ones below make one object per process."""
    return Repository(open_store_at_start(Settings().resolved_store_url, installations))


@cache
def _routes() -> RouteBook:
    return RouteBook(_repository())


@cache
def _cluster() -> RayCluster:
    routes = _routes()  # its table is a new one after every change
    return RayCluster(
        Settings(),
        groups_of=lambda base: routes.table.groups.get(base, ()),
        alive=lambda group_id: group_id in routes.table.alive,
    )


@cache
def _step_models() -> StepModelBook:
    """The step models that the routers use."""
    return StepModelBook(Settings(), lambda: _routes().state, _cluster().inventory)


@cache
def _metrics() -> Metrics:
    REGISTRY.register(QueueMetrics(_cluster().views))
    return Metrics()


@cache
def _tenants() -> TenantsBook:
    return TenantsBook(Settings())


@cache
def _rates() -> RateBook:
    return RateBook(large_body_bytes=LARGE_BODY_BYTES)


async def _rates_of_all() -> list[RateReport]:
    """The rate reports of the gateways that answer."""
    return await answers_of(own_handle("Gateway"), "rates", RATES_TIMEOUT_S)


def make_services() -> Services:
    """The gateway's services from the process's environment."""
    settings = Settings()
    audit = AuditLog(settings, _metrics().audit_lost)
    return Services(settings, _repository(), _routes(), _cluster(), _metrics(), _tenants(), audit, _rates())


def make_app() -> FastAPI:
    return create_app(make_services)


@cache
def _early_refusal() -> EarlyRefusal:
    refused = _metrics().refused_early
    return EarlyRefusal(
        Settings(), lambda: _tenants().tenants, lambda name, count: refused.labels(name).inc(count)
    )


def _serve_metrics(settings: Settings) -> str:
    """Serve this process's metrics; returns the address for other nodes."""
    return serve_metrics(settings.metrics_host, settings.metrics_port_range, ray.util.get_node_ip_address())


async def _as_it_should(task: asyncio.Task[None]) -> None:
    """Raise RuntimeError when a task that never ends has ended."""
    if task.done():
        cause = None if task.cancelled() else task.exception()
        raise RuntimeError("a loop of this replica ended") from cause


@serve.deployment(
    name="Gateway",
    max_ongoing_requests=10_000,  # waiting requests, watches and health probes count here, too
    health_check_period_s=2,
    logging_config=LoggingConfig(enable_access_log=False),  # a log line costs time; metrics count requests
)
@serve.ingress(make_app)
class Gateway:
    """The stateless gateway: every replica reads the same records and routes in the same way."""

    def __init__(self, controller: DeploymentHandle) -> None:
        if problem := environment.problem(os.environ):
            raise RuntimeError(problem)
        keep_replica_on_loopback()
        keep_asking()
        warming.begin()
        answer_first(inference_only(make_services()), _early_refusal())
        log_at_once()
        gc.set_threshold(COLLECT_AFTER)
        self._controller = controller  # keeps the controller in this application
        self._metrics_address = _serve_metrics(Settings())
        telling = _step_models().keep_telling(_cluster().bases_with_requests, _cluster().learn)
        sharing = keep_sharing(_rates_of_all, _rates().hear, lambda: _tenants().tenants.any_rates)
        loop = asyncio.get_running_loop()
        loops = (telling, sharing, _early_refusal().watch())
        self._tasks = tuple(loop.create_task(work) for work in loops)

    async def metrics_address(self) -> str:
        return self._metrics_address

    async def check_health(self) -> None:
        """Raise when a loop of this gateway ended, so that Serve replaces the gateway."""
        for task in self._tasks:
            await _as_it_should(task)

    async def rates(self) -> RateReport:
        return _rates().report()

    async def demand(self) -> dict[str, float]:
        """Requests under way by base. Only the controller calls this."""
        return _cluster().own_demand()

    async def leave_out(self, marker: str) -> None:
        """Leave requests with this marker (request path measurements) out of the metrics; "" counts all."""
        _metrics().probe_marker = marker


@serve.deployment(name="Controller", num_replicas=1, health_check_period_s=2)
class ControllerReplica:
    """Run a Controller while this replica is the leader, for as long as the replica lives."""

    def __init__(self) -> None:
        keep_replica_on_loopback()
        keep_asking()
        log_at_once()
        settings = Settings()
        self._metrics_address = _serve_metrics(settings)
        cluster = RayCluster(settings, starts_agents=True)
        metrics = ControllerMetrics()
        leadership = Leadership(
            open_store_at_start(settings.resolved_store_url, installations),
            lambda store: Controller(settings, Repository(store), cluster, metrics),
            metrics.leads.set,
        )
        loop = asyncio.get_running_loop()
        loops = (leadership.run(), cluster.keep_agents(), cluster.keep_counting())
        self._tasks = tuple(loop.create_task(work) for work in loops)

    async def metrics_address(self) -> str:
        return self._metrics_address

    async def check_health(self) -> None:
        """Raise when a loop of this controller ended, so that Serve replaces the controller."""
        for task in self._tasks:
            await _as_it_should(task)


def build(args: dict[str, Any] | None = None) -> serve.Application:
    """Build the application; `args` come from a Serve config file (`gateway_replicas` only)."""
    settings = Settings()
    if unknown := start_checks.unknown_variables(os.environ):
        log.warning(start_checks.describe_unknown(unknown))
    replicas = int((args or {}).get("gateway_replicas") or settings.gateway_replicas)
    controller = ControllerReplica.options(ray_actor_options={"num_cpus": 0.1})  # type: ignore[attr-defined]
    gateway = Gateway.options(  # type: ignore[attr-defined]
        num_replicas=replicas,
        max_replicas_per_node=settings.gateways_per_node or None,
        ray_actor_options={"num_cpus": 0.1},
    )
    application: serve.Application = gateway.bind(controller.bind())
    return application
