"""The devices of the cluster: what they can do is measured once per node, what is free at each look."""

from __future__ import annotations

from controlplane import serve_runtime
from placement.types import Device, Inventory
from profiler.types import DeviceRates
from workers.messages import DeviceReport, NodeReport


class InventoryBook:
    """Remembers each node's measured devices for as long as the node lives."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeReport] = {}

    async def read(self) -> Inventory:
        """All living nodes' devices with their free memory now."""
        self._nodes |= await serve_runtime.probe_nodes(frozenset(self._nodes))
        free = await serve_runtime.free_memory(frozenset(self._nodes))
        self._nodes = {node_id: report for node_id, report in self._nodes.items() if node_id in free}
        return Inventory(
            tuple(
                _device(report, device, free[node_id].get(device.index, 0))
                for node_id, report in sorted(self._nodes.items())
                for device in report.devices
            )
        )


def _device(node: NodeReport, report: DeviceReport, free_bytes: int) -> Device:
    return Device(
        node=node.node,
        index=report.index,
        kind=report.kind,
        total_bytes=report.total_bytes,
        free_bytes=min(free_bytes, report.total_bytes),
        rates=DeviceRates(report.memory_bytes_per_s, report.flops_per_s),
        model=report.model or report.kind,
        engine=node.engine_version,
    )
