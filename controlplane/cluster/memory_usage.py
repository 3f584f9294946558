"""The memory of each node's devices for display: its users and its reservations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.cluster.inventory import NodeState
from controlplane.cluster.reservations import Ledgers, MemoryUsage, memory_usage, promised
from controlplane.state.records import Reservation
from placement.types import Device, key_of


@dataclass(frozen=True)
class DeviceMemory:
    """A device, the use of its memory, and its reservations."""

    device: Device
    usage: MemoryUsage
    reservations: tuple[Reservation, ...]

    @property
    def reserved_bytes(self) -> int:
        return sum(r.memory_bytes for r in self.reservations)


@dataclass(frozen=True)
class NodeMemory:
    """A node as last reported. `elsewhere`: reservations on devices that the node does not report."""

    node: NodeState
    devices: tuple[DeviceMemory, ...]
    elsewhere: tuple[Reservation, ...]


def memory_by_node(nodes: Sequence[NodeState], ledgers: Ledgers, headroom: float) -> tuple[NodeMemory, ...]:
    """The memory of all reported nodes, and of the nodes that only the ledgers name."""
    unknown = sorted(set(ledgers) - {node.name for node in nodes})
    absent = [NodeState(name, (), 0.0, f"node {name} is not in the cluster", lost=True) for name in unknown]
    return tuple(_of_node(node, ledgers, headroom) for node in (*nodes, *absent))


def _of_node(node: NodeState, ledgers: Ledgers, headroom: float) -> NodeMemory:
    known = ledgers.get(node.name)
    reservations = known.record.reservations if known else ()
    promises = promised({node.name: known} if known else {})
    devices = tuple(
        DeviceMemory(
            device,
            memory_usage(device, promises.get(key_of(device), {}), headroom),
            tuple(r for r in reservations if (r.kind, r.index) == (device.kind, device.index)),
        )
        for device in node.devices
    )
    shown = {r for d in devices for r in d.reservations}
    return NodeMemory(node, devices, tuple(r for r in reservations if r not in shown))
