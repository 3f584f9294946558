"""Nodes, their devices, and who holds what of their memory, for people and their instruments. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.cluster import reservations as ledger
from controlplane.cluster.inventory import NodeState
from controlplane.cluster.reservations import Ledgers, MemoryUsage
from controlplane.state.records import Reservation
from placement.types import Device, key_of


@dataclass(frozen=True)
class DeviceMemory:
    """A device, where its memory is, and what was promised of it."""

    device: Device
    usage: MemoryUsage
    reservations: tuple[Reservation, ...]

    @property
    def reserved_bytes(self) -> int:
        return sum(r.memory_bytes for r in self.reservations)


@dataclass(frozen=True)
class NodeMemory:
    """A node as last reported. `elsewhere` are reservations on devices it does not report."""

    node: NodeState
    devices: tuple[DeviceMemory, ...]
    elsewhere: tuple[Reservation, ...]


def memory_by_node(nodes: Sequence[NodeState], ledgers: Ledgers, headroom: float) -> tuple[NodeMemory, ...]:
    """Of all nodes that were heard of, and of those that only the ledgers know."""
    unknown = sorted(set(ledgers) - {node.name for node in nodes})
    absent = [NodeState(name, (), 0.0, f"node {name} is not in the cluster", lost=True) for name in unknown]
    return tuple(_of_node(node, ledgers, headroom) for node in (*nodes, *absent))


def _of_node(node: NodeState, ledgers: Ledgers, headroom: float) -> NodeMemory:
    found = ledgers.get(node.name)
    reservations = found.record.reservations if found else ()
    promises = ledger.promised({node.name: found} if found else {})
    devices = tuple(
        DeviceMemory(
            device,
            ledger.memory_usage(device, promises.get(key_of(device), {}), headroom),
            tuple(r for r in reservations if (r.kind, r.index) == (device.kind, device.index)),
        )
        for device in node.devices
    )
    shown = {r for d in devices for r in d.reservations}
    return NodeMemory(node, devices, tuple(r for r in reservations if r not in shown))
