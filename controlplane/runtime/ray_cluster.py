"""The cluster as the controller and the gateways see it: engines on Ray Serve, agents and tasks on Ray."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.schema import ProxyStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from controlplane import errors
from controlplane.cluster.engine_status import EngineView
from controlplane.cluster.inventory import NodeState, inventory_of
from controlplane.gateway.engine_client import BaseTraffic, EngineClient
from controlplane.gateway.engine_limits import EngineLimits
from controlplane.gateway.worker_directory import Alive
from controlplane.runtime import serve
from controlplane.runtime.engine_replica import engine_application
from controlplane.runtime.node_agents import AgentBook, living_node_ids
from controlplane.runtime.path_probe import Probe, answering_at_once, probe
from controlplane.settings import Settings
from controlplane.traffic.base_router import RoutingRules
from controlplane.traffic.member_set import StepModels
from controlplane.traffic.request_terms import RequestTerms
from placement.types import Inventory
from profiler.request_path import Burst
from workers.compression.recipe import CompressRequest
from workers.fetching.messages import FetchRequest
from workers.measuring.request import MeasureRequest
from workers.messages import (
    EngineCall,
    EngineConfig,
    EngineHead,
    EngineReply,
    EngineResidency,
    VariantRef,
    WorkerReport,
)

log = logging.getLogger(__name__)

R = TypeVar("R")

COUNT_EVERY_S = 1.0
COUNT_FRESH_S = 3.0
FIND_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 15.0  # a replica's scheduler has 10 s of it
STOP_TIMEOUT_S = 60.0
STOP_LOOK_S = 0.5
TASK_END_S = 10.0
MAX_QUEUED_REQUESTS = 512  # per gateway and base: requests that wait for their turn; then: 429


class RayCluster:
    """The cluster for the controller (`ClusterControl`) and the API (`ClusterAccess`).

    Only the controller's object starts the nodes' agents.
    """

    def __init__(
        self,
        settings: Settings,
        groups_of: Callable[[str], Sequence[str]] = lambda base: (base,),
        alive: Alive = lambda group_id: True,
        starts_agents: bool = False,
    ) -> None:
        """`groups_of` gives the worker groups that serve a base. `alive` tells whether requests may be
        under way in a group."""
        self._settings = settings
        self._groups_of = groups_of
        self._agents = AgentBook(settings, starts_agents)
        self._demand: dict[str, float] | None = None
        self._demand_at_s = 0.0
        self._requests = EngineClient(
            self.find_workers, MAX_QUEUED_REQUESTS, alive, RoutingRules(), EngineLimits()
        )

    # --- engines of worker groups --------------------------------------------------------------

    async def launch(self, config: EngineConfig) -> None:
        """Ask Serve for the engine of a worker group; returns before it runs (`observe` reports when it
        runs).

        Errors: Unavailable when a node of the plan is gone; then another plan is needed.
        """
        planned = {rank.node for rank in config.ranks}
        node_ids = await living_node_ids(planned)
        if gone := sorted(planned - node_ids.keys()):
            raise errors.Unavailable(f"the plan of '{config.name}' needs node {gone[0]}, which is gone")
        application = engine_application(config, self._settings, node_ids)
        await asyncio.to_thread(serve.deploy, application, serve.app_name(config.group_name))

    async def stop(self, group_id: str) -> None:
        """Stop the engine of a worker group and wait until it is gone. Does nothing when no engine is there.

        No thread waits: threads are few, and reading records or engine status needs one. Errors:
        TimeoutError.
        """
        name = serve.app_name(group_id)
        await asyncio.to_thread(ray_serve.delete, name, False)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            while True:
                if name not in await asyncio.to_thread(serve.applications):
                    break
                await asyncio.sleep(STOP_LOOK_S)
        serve.forget_handle(group_id)

    async def observe(self) -> dict[str, EngineView]:
        """The status that Serve reports for each worker group's engine."""
        return serve.engine_views(await asyncio.to_thread(serve.applications))

    async def load_variant(self, group_id: str, variant: VariantRef) -> None:
        """Load a variant into every replica.

        Errors: SourceUnreadable, AdapterMismatch (the engine refuses it); EngineFailed, Unavailable.
        """
        await serve.ask_replicas(group_id, "load_variant", variant)

    async def unload_variant(self, group_id: str, variant: VariantRef) -> None:
        """Unload a variant from every replica. An engine that is gone holds none."""
        with suppress(errors.Unavailable):
            await serve.ask_replicas(group_id, "unload_variant", variant)

    async def reports(self, group_id: str) -> list[WorkerReport]:
        return await serve.ask_replicas(group_id, "report")

    async def probe_path(self, base: str, group_ids: Sequence[str], max_tokens: int) -> list[Burst]:
        """Measure the request path from a node with a proxy, as a client there. Raises the task's errors."""
        marker = secrets.token_hex(16)
        status = await asyncio.to_thread(ray_serve.status)
        nodes = sorted(node for node, state in status.proxies.items() if state == ProxyStatus.HEALTHY)
        asked = Probe(self._settings.local_url, base, marker, self._settings.api_key, max_tokens)
        options = {"num_cpus": 0, "max_retries": 0}
        if nodes:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=nodes[0], soft=False)
        async with _left_out(marker), answering_at_once(group_ids, marker, _answer_at_once):
            task = ray.remote(probe).options(**options).remote(asked)
            try:
                result: list[Burst] = await task
                return result
            finally:
                await _end(task)

    # --- engines of a base ---------------------------------------------------------------------

    async def prefetch(self, base: str, variant: VariantRef) -> None:
        """Prefetch a variant into every replica's host memory. Errors: those of `load_variant`."""
        await self._ask_all(base, "prefetch", variant)

    async def limit_variants(self, base: str, limit: int) -> None:
        """Let every replica run at most `limit` variants at once, from now on."""
        await self._ask_all(base, "limit_variants", limit, timeout_s=ASK_TIMEOUT_S)

    async def residency(self, base: str) -> list[EngineResidency]:
        """The location of the variants in each replica."""
        return await self._ask_all(base, "residency", timeout_s=ASK_TIMEOUT_S)

    async def logs(self, base: str, lines: int) -> str:
        return "".join(await self._ask_all(base, "logs", lines, log_folder()))

    async def _ask_all(
        self, base: str, method: str, *args: Any, timeout_s: float = serve.LOAD_TIMEOUT_S
    ) -> list[Any]:
        """The answers of all replicas of all groups of a base. Errors: Unavailable when the base has no
        group."""
        group_ids = self._groups_of(base)
        if not group_ids:
            raise errors.Unavailable(f"no engine of '{base}' is available; try again", retry_after_s=5)
        calls = (serve.ask_replicas(group_id, method, *args, timeout_s=timeout_s) for group_id in group_ids)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def find_workers(self, base: str) -> list[WorkerReport]:
        """Reports of the groups that answer now. Errors: Serve's error, when no group answers."""
        group_ids = self._groups_of(base)
        answers = await asyncio.gather(*map(_group_workers, group_ids), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if group_ids and len(failures) == len(group_ids):
            raise failures[0]
        return [report for reports in answers if not isinstance(reports, BaseException) for report in reports]

    async def call(self, base: str, request: EngineCall, terms: RequestTerms) -> EngineReply:
        return await self._requests.call(base, request, terms)

    def stream(
        self, base: str, request: EngineCall, terms: RequestTerms
    ) -> AsyncGenerator[EngineHead | bytes, None]:
        return self._requests.stream(base, request, terms)

    def bases_with_requests(self) -> list[str]:
        """Bases whose engines got requests from this process."""
        return self._requests.bases()

    def learn(self, base: str, models: StepModels) -> None:
        """Give routing the step models of a base's engines."""
        self._requests.learn(base, models)

    def views(self) -> dict[str, BaseTraffic]:
        """The requests that wait here, by base."""
        return self._requests.views()

    # --- requests under way --------------------------------------------------------------------

    def own_demand(self) -> dict[str, float]:
        """Mean number of this gateway's requests under way since the last call, by base."""
        return self._requests.demand()

    async def keep_counting(self) -> None:
        """Ask the gateways every second for the requests under way, until cancelled."""
        while True:
            try:
                counts = await serve.ask_own("Gateway", "demand", FIND_TIMEOUT_S)
                self._demand, self._demand_at_s = _sums(counts), time.monotonic()
            except Exception as e:  # gateways come and go; the controller decides nothing until they answer
                log.info("the gateways do not report their running requests: %r", e)
                self._demand = None
            await asyncio.sleep(COUNT_EVERY_S)

    def demand(self) -> Mapping[str, float] | None:
        """Mean number of requests under way between the last two counts, by base, over all gateways. None
        when the gateways did not answer, or answered too long ago."""
        fresh = time.monotonic() - self._demand_at_s <= COUNT_FRESH_S
        return self._demand if fresh else None

    # --- nodes ---------------------------------------------------------------------------------

    async def keep_agents(self) -> None:
        await self._agents.keep()

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        return await self._agents.nodes(wait)

    async def inventory(self) -> Inventory:
        return inventory_of(await self._agents.nodes())

    def measure(self, request: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        """Yield the lines of measurements as a task on the named node makes them. Errors: ProfilingFailed.

        Closing this kills the task's process; the engine that it started ends with it.
        """
        from workers.measuring.engine_runs import carry_out

        return _lines(carry_out, request, node, errors.ProfilingFailed, "; profile the model again")

    def compress(self, request: CompressRequest, node: str) -> AsyncGenerator[str, None]:
        """Yield the lines of a compression as a task on the named node makes them. Errors: Unavailable.

        Closing this kills the task's process; the processes that it started end with it.
        """
        from workers.compression.process import carry_out

        return _lines(carry_out, request, node, errors.Unavailable)

    def fetch(self, request: FetchRequest, node: str) -> AsyncGenerator[str, None]:
        """Yield the lines of a fetch as a task on the named node makes them; "": on this node. Errors:
        Unavailable.

        Closing this kills the task's process; the process that it started ends with it.
        """
        from workers.fetching.process import carry_out

        return _lines(carry_out, request, node, errors.Unavailable)

    def convert_bundled(self, name: str) -> Path:
        """Make (once) the folder of a bundled model, in a separate process because it needs torch.
        Blocking."""
        from workers import bundled

        convert = ray.remote(bundled.ensure).options(num_cpus=0)
        try:
            return Path(ray.get(convert.remote(name, self._settings.home / "models")))
        except RayError as e:
            raise not_converted(name, e) from e

    async def metrics_targets(self) -> list[tuple[str, str]]:
        """(address, component) of every process of ours that serves metrics and reports its address."""
        running = [group_id for group_id, view in (await self.observe()).items() if view.replicas]
        addresses = await asyncio.gather(
            *(_own_metrics(component) for component in ("Gateway", "Controller")),
            *map(_engine_metrics, running),
        )
        return [target for targets in addresses for target in targets]


async def _own_metrics(component: str) -> list[tuple[str, str]]:
    addresses = await serve.answers_of(serve.own_handle(component), "metrics_address", FIND_TIMEOUT_S)
    return [(address, component.lower()) for address in addresses]


async def _engine_metrics(group_id: str) -> list[tuple[str, str]]:
    reports = await serve.answers_of(serve.engine_handle(group_id), "report", FIND_TIMEOUT_S)
    return [(report.metrics_address, f"engine-{group_id}") for report in reports]


async def _group_workers(group_id: str) -> list[WorkerReport]:
    """Reports of the workers that answer now, for the request path. Raises Serve's errors."""
    response = serve.engine_handle(group_id).broadcast("report")
    answers = await response.results_async(timeout_s=FIND_TIMEOUT_S, return_exceptions=True)
    return [answer for answer in answers if isinstance(answer, WorkerReport)]


@asynccontextmanager
async def _left_out(marker: str) -> AsyncIterator[None]:
    """Within this block the gateways' metrics count no requests with this marker."""
    try:
        await serve.ask_own("Gateway", "leave_out", FIND_TIMEOUT_S, marker)
        yield
    finally:
        with suppress(Exception):  # gateways come and go; requests no longer carry the marker
            await serve.ask_own("Gateway", "leave_out", FIND_TIMEOUT_S, "")


async def _answer_at_once(group_id: str, marker: str) -> list[str]:
    answers = await serve.ask_replicas(group_id, "answer_at_once", marker, timeout_s=ASK_TIMEOUT_S)
    return [str(answer) for answer in answers]


async def _lines(
    carry_out: Callable[[R], Iterator[str]],
    request: R,
    node: str,
    failed: type[errors.OstinatoError],
    remedy: str = "",
) -> AsyncGenerator[str, None]:
    """Yield the lines of a task on the named node as they come; "": on this node. Closing this kills its
    process. Errors: `failed`."""
    node_id = _own_node_id() if not node else (await living_node_ids([node])).get(node)
    if node_id is None:
        raise failed(f"node {node} is gone{remedy}")
    task = ray.remote(carry_out).options(
        num_cpus=0,
        max_retries=0,
        num_returns="streaming",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    )
    lines = task.remote(request)
    try:
        async for line in lines:
            yield await line
    except RayError as e:
        text = re.sub(r"^(Measuring|Compressing|Fetching)Error: ", "", serve.first_line(e))
        raise failed(text) from e
    finally:
        ray.cancel(lines, force=True)


def _own_node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


async def _end(task: Any) -> None:
    """Kill a task's process and wait until it is gone: its later requests would reach the engines."""
    ray.cancel(task, force=True)
    # the task's own error, which its caller gets, or the error that the kill causes
    with suppress(Exception):
        async with asyncio.timeout(TASK_END_S):
            await task


def _sums(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Requests under way by base, of all gateways."""
    sums: dict[str, float] = {}
    for by_base in counts:
        for base, count in by_base.items():
            sums[base] = sums.get(base, 0) + count
    return sums


def log_folder() -> str:
    """The folder of this cluster's logs, on the node that asks."""
    return str(ray._private.worker._global_node.get_logs_dir_path())


def not_converted(name: str, error: RayError) -> errors.OstinatoError:
    """The error for a bundled model that was not converted: the disk is full, or the package is damaged."""
    if _is_full(serve.cause(error)):
        return errors.Unavailable(
            f"the disk of OSTINATO_HOME has no space left for the files of the bundled model '{name}'; free"
            " space there, then register the model again"
        )
    return errors.SourceUnreadable(
        f"the bundled model '{name}' could not be converted: {serve.first_line(error)}", param="source"
    )


def _is_full(error: BaseException) -> bool:
    """Tell whether the disk is full. safetensors raises its own error, which quotes the system's."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
