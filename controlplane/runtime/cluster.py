"""The cluster as the controller and the gateway see it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from controlplane import errors
from controlplane.cluster.engine_status import EngineView
from controlplane.cluster.inventory import NodeState, inventory_of
from controlplane.gateway.engine_client import EngineClient
from controlplane.gateway.worker_pool import Alive
from controlplane.runtime import serve as serve_runtime
from controlplane.runtime.node_agents import AgentBook
from controlplane.settings import Settings
from placement.types import Inventory
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

COUNT_EVERY_S = 1.0
COUNT_FRESH_S = 3.0

R = TypeVar("R")


class ServeRuntime:
    """The cluster, as the controller and the gateway see it: `serve_runtime` with its settings.

    That of the controller starts the nodes' agents.
    """

    def __init__(
        self,
        settings: Settings,
        groups_of: Callable[[str], Sequence[str]] = lambda host: (host,),
        alive: Alive = lambda group: True,
        starts_agents: bool = False,
    ) -> None:
        """`groups_of` says which worker groups serve a base, `alive` in which requests may be under way."""
        self._settings = settings
        self._groups_of = groups_of
        self._agents = AgentBook(settings, starts_agents)
        self._demand: dict[str, float] | None = None
        self._demand_at_s = 0.0
        self._requests = EngineClient(self.find_workers, settings.max_queued_requests, alive)

    async def find_workers(self, host: str) -> list[WorkerReport]:
        """Of the groups that can give a report now. Errors: what Serve raises, when none can."""
        groups = self._groups_of(host)
        found = await asyncio.gather(*map(serve_runtime.find_workers, groups), return_exceptions=True)
        answers = [one for one in found if not isinstance(one, BaseException)]
        if not answers and groups:
            raise next(one for one in found if isinstance(one, BaseException))
        return [report for answer in answers for report in answer]

    async def _of_all(self, host: str, ask: Callable[..., Awaitable[R]], *args: Any) -> list[R]:
        """What each group of a base says. Errors: those of `ask`; Unavailable when there is none."""
        groups = self._groups_of(host)
        if not groups:
            raise errors.Unavailable(f"no engine of '{host}' is there; try again", retry_after_s=5)
        return list(await asyncio.gather(*(ask(group, *args) for group in groups)))

    async def launch(self, config: EngineConfig) -> None:
        await serve_runtime.launch(config, self._settings)

    async def stop(self, group: str) -> None:
        await serve_runtime.stop(group)
        serve_runtime.forget_handle(group)

    async def observe(self) -> dict[str, EngineView]:
        return dict(await serve_runtime.observe())

    async def load_variant(self, group: str, variant: VariantRef) -> None:
        await serve_runtime.load_variant(group, variant)

    async def unload_variant(self, group: str, variant: VariantRef) -> None:
        await serve_runtime.unload_variant(group, variant)

    async def keep_agents(self) -> None:
        await self._agents.keep()

    async def keep_counting(self) -> None:
        """Ask the gateways every second for the requests under way, until cancelled."""
        while True:
            try:
                self._demand, self._demand_at_s = await serve_runtime.demand(), time.monotonic()
            except Exception as e:  # gateways come and go; nothing is decided until they answer
                log.info("the gateways do not say what is under way: %r", e)
                self._demand = None
            await asyncio.sleep(COUNT_EVERY_S)

    def demand(self) -> Mapping[str, float] | None:
        """As all gateways last said; None when they did not, or too long ago."""
        fresh = time.monotonic() - self._demand_at_s <= COUNT_FRESH_S
        return self._demand if fresh else None

    def own_demand(self) -> dict[str, float]:
        """Of this gateway, since this was last asked."""
        return self._requests.demand()

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        return await self._agents.nodes(wait)

    async def inventory(self) -> Inventory:
        return inventory_of(await self._agents.nodes())

    def measure(self, request: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        return serve_runtime.measure(request, node)

    def convert_bundled(self, name: str) -> Path:
        return serve_runtime.convert_bundled(name, self._settings.home / "models")

    async def call(self, host: str, request: EngineCall) -> EngineReply:
        return await self._requests.call(host, request)

    def stream(self, host: str, request: EngineCall) -> AsyncGenerator[EngineHead | bytes, None]:
        return self._requests.stream(host, request)

    async def reports(self, group: str) -> list[WorkerReport]:
        return await serve_runtime.reports(group)

    async def residency(self, host: str) -> list[EngineResidency]:
        return [one for some in await self._of_all(host, serve_runtime.residency) for one in some]

    async def limit_variants(self, host: str, limit: int) -> None:
        await self._of_all(host, serve_runtime.limit_variants, limit)

    async def prefetch(self, host: str, variant: VariantRef) -> None:
        await self._of_all(host, serve_runtime.prefetch, variant)

    async def logs(self, host: str, lines: int) -> str:
        return "".join(await self._of_all(host, serve_runtime.logs, lines))

    async def metrics_targets(self) -> list[tuple[str, str]]:
        return await serve_runtime.metrics_targets()
