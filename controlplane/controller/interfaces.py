"""What actions need of the cluster's engines, and of the controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controlplane.cluster.engine_status import EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.controller.profile_actions import Conclude, Note
from controlplane.state.records import Deployment
from placement.types import Inventory
from workers.messages import EngineConfig, VariantRef, WorkerReport


class Engines(Protocol):
    """What is needed of the cluster. Engines are named for their worker groups."""

    async def inventory(self) -> Inventory: ...

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes as last heard of; `wait` a while for those that are new."""
        ...

    async def launch(self, config: EngineConfig) -> None: ...

    async def stop(self, group: str) -> None: ...

    async def reports(self, group: str) -> list[WorkerReport]: ...

    async def load_variant(self, group: str, variant: VariantRef) -> None: ...

    async def unload_variant(self, group: str, variant: VariantRef) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """The controller's: notes and ends of operations, how an engine was last seen, and how many groups a
    deployment should have by its load."""

    note: Note
    conclude: Conclude
    view: Callable[[str], EngineView | None]
    wanted: Callable[[Deployment], int]
