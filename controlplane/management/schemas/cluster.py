"""The cluster as users see it: nodes, devices, and who holds what of their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.management.schemas.common import View

if TYPE_CHECKING:
    from controlplane.cluster.memory_usage import DeviceMemory, NodeMemory
    from controlplane.state.records import Reservation


class ReservationView(View):
    """Memory that is reserved for one rank of a deployment.

    `deployment` is `measuring:KEY` for the engine with which the profile of this key is measured.
    """

    deployment: str
    rank: int
    device: str
    bytes: int
    since: float

    @classmethod
    def of(cls, r: Reservation) -> ReservationView:
        return cls(
            deployment=r.holder,
            rank=r.rank,
            device=f"{r.kind}:{r.index}",
            bytes=r.memory_bytes,
            since=r.since_s,
        )


class UseView(View):
    """Memory that processes use now.

    `deployment` is the base whose engine they are, or `measuring:KEY`. It is "" for processes that are no
    engine of this installation, and null for processes that the node cannot name.
    """

    deployment: str | None
    bytes: int


class ClusterDeviceView(View):
    """A GPU, or a CPU host.

    `usedBytes` of `totalBytes` are in use by any process, `reservedBytes` are reserved for deployments and
    measurings, and `headroomBytes` are never given. `freeBytes` are left for the next placement: neither
    reserved, nor used beyond the reservations, nor headroom. `load` is 0 to 1.
    An `island` is an NVLink domain.
    """

    index: int
    kind: str
    model: str
    totalBytes: int
    usedBytes: int
    reservedBytes: int
    headroomBytes: int
    freeBytes: int
    load: float
    island: int
    reservations: list[ReservationView]
    uses: list[UseView]

    @classmethod
    def of(cls, held: DeviceMemory) -> ClusterDeviceView:
        d = held.device
        return cls(
            index=d.index,
            kind=d.kind,
            model=d.model,
            totalBytes=d.total_bytes,
            usedBytes=d.total_bytes - d.free_bytes,
            reservedBytes=held.reserved_bytes,
            headroomBytes=held.usage.headroom,
            freeBytes=held.usage.free,
            load=d.load,
            island=d.nvlink_domain,
            reservations=[ReservationView.of(r) for r in held.reservations],
            uses=[UseView(deployment=use.holder, bytes=use.memory_bytes) for use in d.uses],
        )


class NodeView(View):
    """On a `usable` node something new may be placed; of any other `reason` says why not.

    The engines of a `lost` node are lost. `reportAgeS` is the age of the report on its devices.
    """

    name: str
    usable: bool
    lost: bool
    reason: str
    reportAgeS: float
    agentPid: int
    cores: float
    devices: list[ClusterDeviceView]
    otherReservations: list[ReservationView]

    @classmethod
    def of(cls, held: NodeMemory) -> NodeView:
        node = held.node
        return cls(
            name=node.name,
            usable=not node.problem,
            lost=node.lost,
            reason=node.problem,
            reportAgeS=round(node.age_s, 3),
            agentPid=node.agent_pid,
            cores=node.cores,
            devices=[ClusterDeviceView.of(device) for device in held.devices],
            otherReservations=[ReservationView.of(r) for r in held.elsewhere],
        )


class ClusterView(View):
    nodes: list[NodeView]
