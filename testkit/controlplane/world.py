"""An installation without its gateway: a real controller and store, over an in-memory cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.controller.controller import Controller
from controlplane.controller.metrics import ControllerMetrics
from controlplane.management.commands import deploy_model, register_model, undeploy_model
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import RegisterModelRequest
from controlplane.settings import Settings
from controlplane.state.records import Operation, Phase
from controlplane.state.repository import Repository, State
from placement.types import Inventory, Unusable
from testkit.in_memory import CPU, InMemoryCluster, submit
from testkit.loops import until

NODES = Inventory((CPU, replace(CPU, node="other")))


class World:
    """One installation without its gateway."""

    def __init__(self, settings: Settings, repository: Repository, files: Path) -> None:
        self.settings, self.repository, self.files = settings, repository, files
        self.cluster = InMemoryCluster(NODES)

    def lose(self, *names: str) -> None:
        """These nodes are lost, and what Serve had there does not answer."""
        left = [d for d in self.cluster.devices.devices if d.node not in names]
        known = {u.node for u in self.cluster.devices.unusable}
        lost = [Unusable(n, f"node {n} is gone", lost=True) for n in names if n not in known]
        self.cluster.devices = Inventory(tuple(left), (*self.cluster.devices.unusable, *lost))
        for engine in self.cluster.engines.values():
            if any(rank.node in names for rank in engine.config.ranks):
                engine.view = EngineView(EngineStatus.UNHEALTHY, "its replica died")

    def find(self) -> None:
        self.cluster.devices = NODES

    @asynccontextmanager
    async def controlled(self) -> AsyncIterator[None]:
        """A controller runs inside this block; at its end it is killed."""
        controller = Controller(
            self.settings, self.repository, self.cluster, ControllerMetrics(CollectorRegistry())
        )
        task = asyncio.create_task(controller.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await controller.settle()

    def register(self, name: str, base: str | None = None, folder: str = "") -> Operation:
        path = str(self.files / (folder or name))
        where = {"base": base, "adapter": path} if base else {"source": path}
        request = RegisterModelRequest.model_validate({"model": name, **where})
        return submit(self.repository, register_model, request)

    def deploy(self, name: str, **options: Any) -> Operation:
        request = DeployModelRequest.model_validate({"model": name, **options})
        return submit(self.repository, deploy_model, request)

    def undeploy(self, name: str) -> Operation:
        return submit(self.repository, undeploy_model, name)

    def phase(self, operation: Operation) -> Phase:
        return self.repository.read().operations[operation.id].record.phase

    async def until(self, holds: Callable[[], Any]) -> None:
        await until(holds)

    async def end(self, operation: Operation) -> Operation:
        await self.until(lambda: self.repository.read().operations[operation.id].record.done)
        return self.repository.read().operations[operation.id].record

    async def up(self, *variants: str) -> None:
        await self.end(self.register("base"))
        for name in variants:
            await self.end(self.register(name, "base"))
        for name in ("base", *variants):
            assert (await self.end(self.deploy(name))).phase is Phase.DEPLOYED


def reserved(state: State) -> set[tuple[Any, ...]]:
    """The ledgers' promises, by holder, rank and device."""
    return {
        (r.holder, r.uid, r.rank, node, r.kind, r.index, r.memory_bytes)
        for node, found in state.ledgers.items()
        for r in found.record.reservations
    }


def placed(state: State) -> set[tuple[Any, ...]]:
    """The deployments' account of the same."""
    return {
        (name, d.uid, r.rank, r.node, r.device_kind, r.device_index, r.memory_bytes)
        for d in (found.record for found in state.deployments.values())
        for name, group in zip(d.group_ids(), d.groups, strict=True)
        for r in (group.placement.ranks if group.placement else ())
    }
