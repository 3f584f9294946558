"""The cluster for the controller and its actions (`RayCluster` implements it), and the hooks of actions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controlplane.cluster.engine_status import EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.state.operations import End
from controlplane.state.records import Deployment, OperationKind, Phase
from controlplane.state.repository import Change, State
from placement.types import Inventory
from profiler.request_path import Burst
from workers.compression.recipe import CompressRequest
from workers.fetching.messages import FetchRequest, Progress
from workers.measuring.request import MeasureRequest
from workers.messages import EngineConfig, VariantRef, WorkerReport


class EngineControl(Protocol):
    """The engines and nodes, for actions on groups. An engine has the id of its worker group."""

    async def inventory(self) -> Inventory: ...

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        """All nodes as last reported; with `wait`, wait a while for reports of new nodes."""
        ...

    async def launch(self, config: EngineConfig) -> None: ...

    async def stop(self, group_id: str) -> None: ...

    async def reports(self, group_id: str) -> list[WorkerReport]: ...

    async def load_variant(self, group_id: str, variant: VariantRef) -> None: ...

    async def unload_variant(self, group_id: str, variant: VariantRef) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """What actions need from the controller: notes and ends of operations, the last view of a group's engine,
    the target number of a deployment's groups under its load, and models' fetched files on nodes."""

    note: Note
    conclude: Conclude
    view: Callable[[str], EngineView | None]
    wanted: Callable[[Deployment], int]
    fetched: EnsureFetched


class Measurer(Protocol):
    """Measurements on the cluster, for profiles."""

    async def inventory(self) -> Inventory: ...

    def measure(self, request: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        """Lines of measurements as they are made on `node`. Closing it ends the measurement.

        Raises ProfilingFailed, after the lines measured before.
        """
        ...


class Compressor(Protocol):
    """Compressions on the cluster."""

    async def inventory(self) -> Inventory: ...

    def compress(self, request: CompressRequest, node: str) -> AsyncGenerator[str, None]:
        """Lines (workers.compression.lines) of a compression on `node`. Closing it ends the compression.

        Raises Unavailable when it was cut off: started again it continues.
        """
        ...


class Fetcher(Protocol):
    """Fetches of remote sources on the cluster."""

    def fetch(self, request: FetchRequest, node: str) -> AsyncGenerator[str, None]:
        """Lines (workers.fetching.messages) of a fetch on `node`; "": on this process's node. Closing it ends
        the fetch.

        Raises Unavailable when it was cut off: started again it continues.
        """
        ...


class PathProber(Protocol):
    """Measurements of the request path, from inside the cluster."""

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]: ...

    async def probe_path(self, base: str, group_ids: Sequence[str], max_tokens: int) -> list[Burst]:
        """Send requests to a base as clients do; its groups' engines answer at once. Prompts have at most
        about `max_tokens`.

        Raises any error that occurs.
        """
        ...


class Note(Protocol):
    def __call__(
        self, kind: OperationKind, target: str, phase: Phase, message: str, progress: float | None = None
    ) -> Awaitable[None]: ...


class EnsureFetched(Protocol):
    """Has the fetched files of these models on these nodes. Errors: those of sources, Unavailable."""

    def __call__(
        self, names: Iterable[str], nodes: Collection[str], tell: Callable[[Progress], Awaitable[None]]
    ) -> Awaitable[None]: ...


Conclude = Callable[
    [OperationKind, str, End, Callable[[State], Sequence[Change]]],
    Awaitable[None],
]


class ClusterControl(Measurer, Compressor, Fetcher, PathProber, EngineControl, Protocol):
    """Everything that the controller does with the cluster; `RayCluster` implements it."""

    async def observe(self) -> dict[str, EngineView]: ...

    def demand(self) -> Mapping[str, float] | None:
        """Requests under way by base, including waiting ones: the mean over the last second.

        None when the gateways have not reported recently.
        """
        ...

    def convert_bundled(self, name: str) -> Path:
        """Blocking; called in a thread."""
        ...
