"""The devices of the cluster, as its nodes last reported them: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from placement.solver.cluster import load_of
from placement.types import CPU, Device, HolderMemory, Inventory, Unusable
from profiler.types import DeviceRates
from workers.agent.reports import AgentReport, DeviceSample
from workers.messages import DeviceReport, NodeReport


@dataclass(frozen=True)
class NodeContact:
    """The last news of a node. `silent_s`: the age of its devices' last sample; without a report, the time
    since it was found. `problem`: why there is nothing newer, if known. `unmeasured`: why its devices
    could not be measured. `id` is Ray's: a restarted node has another id."""

    node: str
    alive: bool
    silent_s: float
    report: AgentReport | None = None
    problem: str = ""
    id: str = ""
    unmeasured: str = ""


@dataclass(frozen=True)
class Timeouts:
    """A node that is silent for `stale_s` gets no new placements: a deployment that needs the node waits.
    After `lost_s` the node is lost, and nothing waits for it."""

    stale_s: float = 5.0
    lost_s: float = 30.0


TIMEOUTS = Timeouts()


@dataclass(frozen=True)
class NodeState:
    """A node and its devices as last reported, `age_s` ago. `problem`: why no new placement is allowed;
    empty if it is. `gone`: Ray says that the node ended, so its engines are lost. `lost`: the node has
    been silent for long, but its engines may still run. `ids`: Ray's ids of the living nodes with this
    name. `awaited`: the event that soon gives the node devices for new placements; empty if none is
    expected."""

    name: str
    devices: tuple[Device, ...]
    age_s: float
    problem: str = ""
    lost: bool = False
    cores: float = 0.0
    agent_pid: int = 0
    gone: bool = False
    ids: tuple[str, ...] = ()
    awaited: str = ""


def node_states(contacts: Iterable[NodeContact], timeouts: Timeouts) -> tuple[NodeState, ...]:
    """All nodes by name."""
    by_name: dict[str, list[NodeContact]] = defaultdict(list)
    for contact in contacts:
        by_name[contact.node].append(contact)
    return tuple(_state(_current(same), timeouts, same) for _, same in sorted(by_name.items()))


def inventory_of(nodes: Sequence[NodeState]) -> Inventory:
    """The devices that placement may use now, and the reasons for the rest."""
    usable = [device for node in nodes if not node.problem for device in node.devices]
    unusable = (Unusable(n.name, n.problem, n.lost, n.awaited) for n in nodes if n.problem)
    return Inventory(tuple(usable), tuple(unusable))


def ray_ids(nodes: Iterable[NodeState]) -> dict[str, str]:
    """Ray's id of each living node, by name. Nodes that share a name are left out."""
    return {node.name: node.ids[0] for node in nodes if len(node.ids) == 1}


def _current(namesakes: Sequence[NodeContact]) -> NodeContact:
    """The newest of a node's contacts: a node that came back has a new id, and the old id is dead."""
    return min(namesakes, key=lambda contact: (not contact.alive, contact.silent_s))


def _state(contact: NodeContact, timeouts: Timeouts, namesakes: Sequence[NodeContact]) -> NodeState:
    report = contact.report
    lost = not contact.alive or contact.silent_s > timeouts.lost_s
    living = sum(namesake.alive for namesake in namesakes)
    problem = _problem(contact, timeouts, living)
    devices = _devices(contact.node, report, report.rates) if report and report.rates else ()
    return NodeState(
        contact.node,
        devices,
        contact.silent_s,
        problem or ("" if devices else f"node {contact.node} has no device"),
        lost,
        max((d.cores for d in report.devices), default=0.0) if report else 0.0,
        report.pid if report else 0,
        gone=not contact.alive,
        ids=tuple(sorted(namesake.id for namesake in namesakes if namesake.alive and namesake.id)),
        awaited="" if lost or living > 1 else _awaited(contact, timeouts),
    )


def _problem(contact: NodeContact, timeouts: Timeouts, living: int) -> str:
    if not contact.alive:
        return f"node {contact.node} is gone; its last report was {_ago(contact)}"
    if living > 1:
        return (
            f"{living} nodes have the name {contact.node}, but names of nodes identify devices; "
            "give each node its own name (ray start --node-name)"
        )
    overdue = _lateness(contact, timeouts)
    return f"{overdue}: {_cause(contact)}" if overdue and _cause(contact) else overdue


def _lateness(contact: NodeContact, timeouts: Timeouts) -> str:
    if contact.report is None:
        return f"node {contact.node} has not reported yet, {contact.silent_s:.1f} s after it joined"
    if contact.silent_s > timeouts.lost_s:
        return f"node {contact.node} is lost: its last report was {_ago(contact)}"
    if contact.silent_s > timeouts.stale_s:
        return f"stale report: the last report of node {contact.node} was {_ago(contact)}"
    if contact.report.rates:
        return ""
    if contact.unmeasured:
        return f"the devices of node {contact.node} could not be measured yet: {contact.unmeasured}"
    return f"the devices of node {contact.node} are being measured"


def _awaited(contact: NodeContact, timeouts: Timeouts) -> str:
    """The event after which a living node has devices: it was measured, or it reports again. A report is
    late on a busy machine, too."""
    if contact.report is None or contact.report.rates is None:
        return "" if contact.unmeasured else f"the devices of {contact.node} have been measured"
    return f"node {contact.node} reports again" if contact.silent_s > timeouts.stale_s else ""


def _ago(contact: NodeContact) -> str:
    return f"{contact.silent_s:.1f} s ago"


def _cause(contact: NodeContact) -> str:
    return contact.problem or (contact.report.problem if contact.report else "")


def _devices(node: str, report: AgentReport, rates: NodeReport) -> tuple[Device, ...]:
    measured = {(d.kind, d.index): d for d in rates.devices}
    return tuple(
        _device(node, sample, measured[sample.kind, sample.index], rates.engine_version)
        for sample in report.devices
        if (sample.kind, sample.index) in measured
    )


def _device(node: str, sample: DeviceSample, measured: DeviceReport, engine: str) -> Device:
    return Device(
        node=node,
        index=sample.index,
        kind=sample.kind,
        total_bytes=sample.total_bytes,
        free_bytes=max(0, sample.total_bytes - sample.used_bytes),
        rates=DeviceRates(measured.memory_bytes_per_s, measured.flops_per_s),
        model=measured.model or sample.kind,
        engine=engine,
        load=_load(sample),
        nvlink_domain=sample.nvlink_domain,
        uses=_uses(sample),
        work=sample.work,
    )


def _load(sample: DeviceSample) -> float:
    """The load: for a GPU, the share of time it was busy; for a CPU host, which is always a little busy,
    its mean utilisation."""
    if sample.kind == CPU:
        return fmean(sample.utilisation) if sample.utilisation else 0.0
    return load_of(sample.utilisation)


def _uses(sample: DeviceSample) -> tuple[HolderMemory, ...]:
    """The memory in use on a device, by holder; processes without a known holder come first."""
    bytes_of: dict[str | None, int] = defaultdict(int)
    for process in sample.processes:
        bytes_of[process.holder] += process.memory_bytes
    return tuple(
        HolderMemory(holder, count)
        for holder, count in sorted(bytes_of.items(), key=lambda item: item[0] or "")
    )
