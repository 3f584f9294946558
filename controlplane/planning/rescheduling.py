"""When and why a worker group has to be placed again, how soon, and the cost meanwhile. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.cluster.reservations import Ledgers
from controlplane.state.records import Deployment
from controlplane.state.worker_groups import GroupPhase, WorkerGroup, group_id_of
from placement.types import DeviceKey, Placement, key_of

FIRST_DELAY_S = 2.0  # before the second attempt in a row; it doubles each time
MAX_DELAY_S = 60.0
NO_ROOM_S = 30.0  # time between attempts on a cluster that had no room and has not changed
STEADY_S = 600.0  # after serving for this long, a failure is not counted as one in a row


def replacement_reason(group: WorkerGroup, engine: EngineView | None, nodes: Sequence[NodeState]) -> str:
    """Why a placed group has to be placed again; empty if it need not be."""
    if group.placement is None:
        return ""
    if broken := _broken(group, group.placement, engine, nodes):
        return broken
    if engine is not None and engine.status is EngineStatus.FAILED:
        return f"the engine failed: {readable(engine.message)}"
    return ""


def mark_start_timeouts(
    engines: Mapping[str, EngineView], deployments: Iterable[Deployment], now_s: float, limit_s: float
) -> dict[str, EngineView]:
    """The engines; those that have not started within the limit count as failed."""
    starting = {
        group_id_of(d.base, group.number): group.since_s
        for d in deployments
        for group in d.groups
        if group.phase is GroupPhase.STARTING and group.placement is not None
    }
    failed = EngineView(EngineStatus.FAILED, f"the engine did not start within {limit_s:g} s")
    return {
        group_id: failed if _starts(view) and now_s - starting.get(group_id, now_s) > limit_s else view
        for group_id, view in engines.items()
    }


def _starts(view: EngineView) -> bool:
    return view.status in (EngineStatus.STARTING, EngineStatus.UNHEALTHY)


def _broken(
    group: WorkerGroup, placement: Placement, engine: EngineView | None, nodes: Sequence[NodeState]
) -> str:
    """The lost device of a placement; empty if none is known to be lost, as before any node has reported."""
    known = {node.name: node for node in nodes}
    promised: dict[DeviceKey, int] = {}
    for rank in placement.ranks if known else ():
        node = known.get(rank.node)
        if node is None:
            return f"node {rank.node} is not in the cluster"
        if problem := _away(node, group.node_ids.get(rank.node, ""), engine):
            return problem
        promised[rank.device] = promised.get(rank.device, 0) + rank.memory_bytes
    for device, wanted in promised.items():
        if problem := _shrunk(known[device.node], device, wanted):
            return problem
    return ""


def _away(node: NodeState, known_id: str, engine: EngineView | None) -> str:
    """Why nothing runs on a node any longer. Its agent may hang while its engines run."""
    if node.gone:
        return node.problem or f"node {node.name} is gone"
    if known_id and node.ids and known_id not in node.ids:
        return f"node {node.name} was restarted"
    if node.lost and (engine is None or engine.status in (EngineStatus.UNHEALTHY, EngineStatus.FAILED)):
        return node.problem or f"node {node.name} is lost"
    return ""


def _shrunk(node: NodeState, key: DeviceKey, wanted: int) -> str:
    """Why a device no longer has enough memory. Only a node that reports can show that."""
    if node.problem:
        return ""
    name = f"{key.kind}:{key.number} of node {key.node}"
    total = {key_of(device): device.total_bytes for device in node.devices}.get(key)
    if total is None:
        return f"{name} is gone"
    if total < wanted:
        return f"{name} has only {total / 2**30:.2f} GiB now, but its ranks reserved {wanted / 2**30:.2f} GiB"
    return ""


def delay_s(failures: int) -> float:
    """The pause before placing a group again after this many failures in a row: none at first, then
    growing."""
    if failures <= 1:
        return 0.0
    return min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 2, 16))


def unplaced(group: WorkerGroup, reason: str, now_s: float) -> WorkerGroup:
    """The group, to be placed again."""
    steady = group.phase is GroupPhase.SERVING and now_s - group.since_s >= STEADY_S
    failures = 1 if steady else group.failures + 1
    return WorkerGroup(
        group.number,
        reason=reason,
        failures=failures,
        retry_at_s=now_s + delay_s(failures),
        kind=group.device_kind,
    )


def refused(group: WorkerGroup, reason: str, cluster: str, now_s: float) -> WorkerGroup:
    """The group after the cluster, described by this key, had no room for it."""
    return WorkerGroup(
        group.number,
        reason=reason,
        failures=group.failures,
        retry_at_s=now_s + NO_ROOM_S,
        refused_on=cluster,
        kind=group.device_kind,
    )


def due(group: WorkerGroup, cluster: str, now_s: float) -> bool:
    """Whether it is time to place a group without an engine."""
    changed = group.refused_on not in ("", cluster)
    return group.phase is not GroupPhase.PENDING or changed or now_s >= group.retry_at_s


def cluster_key(nodes: Sequence[NodeState], ledgers: Ledgers, exclude: str = "") -> str:
    """A key that changes with the devices, and with promises to holders other than `exclude`, but not with
    use."""
    devices = sorted(
        (*key_of(device), device.total_bytes) for node in nodes if not node.problem for device in node.devices
    )
    promises = sorted(
        (name, r.holder, r.rank, r.kind, r.index, r.memory_bytes)
        for name, ledger in ledgers.items()
        for r in ledger.record.reservations
        if r.holder != exclude
    )
    return hashlib.sha256(repr((devices, promises)).encode()).hexdigest()[:16]


def readable(message: str) -> str:
    """The last line of a message; in a traceback it says what happened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:500]
