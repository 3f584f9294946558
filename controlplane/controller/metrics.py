"""The controller's metrics. Labels are bounded: names of deployed models, documented codes."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from controlplane.cluster.memory_usage import DeviceMemory, NodeMemory
from controlplane.gateway.metrics import audit_lost


class ControllerMetrics:
    """The number of records in each phase, and the controller's actions."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.deployments = Gauge(
            "ostinato_deployments", "Deployments by phase.", ["phase"], registry=registry
        )
        self.models = Gauge("ostinato_models", "Registered models by phase.", ["phase"], registry=registry)
        self.actions = Counter(
            "ostinato_controller_actions", "Actions carried out.", ["action", "outcome"], registry=registry
        )
        self.engines = Gauge("ostinato_engines", "Engines by status.", ["status"], registry=registry)
        self.leads = Gauge(
            "ostinato_controller_leads",
            "1 if this controller acts, 0 if it stands by.",
            registry=registry,
        )
        self.devices = DeviceMetrics(registry)
        self.audit_lost = audit_lost(registry)


class DeviceMetrics:
    """Memory and load of every device, and the age of the reports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._memory = Gauge(
            "ostinato_device_memory_bytes",
            "A device's memory: total, used by all processes, reserved, free for the next placement.",
            ["node", "device", "state"],
            registry=registry,
        )
        self._load = Gauge(
            "ostinato_device_load",
            "Share of the last two minutes in which a GPU was busy, or a CPU's mean utilisation.",
            ["node", "device"],
            registry=registry,
        )
        self._age = Gauge(
            "ostinato_node_report_age_seconds",
            "Age of a node's last report of its devices.",
            ["node"],
            registry=registry,
        )
        self._usable = Gauge(
            "ostinato_node_usable",
            "1 for a node where new engines may be placed.",
            ["node"],
            registry=registry,
        )
        self._shown: set[tuple[Gauge, tuple[str, ...]]] = set()

    def show(self, held: Iterable[NodeMemory]) -> None:
        """Set all series to the current values; remove the series of devices that are gone."""
        series: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        for node in held:
            name = node.node.name
            series[self._age, (name,)] = node.node.age_s
            series[self._usable, (name,)] = not node.node.problem
            for memory in node.devices:
                device = f"{memory.device.kind}:{memory.device.index}"
                series[self._load, (name, device)] = memory.device.load
                for state, count in _states(memory).items():
                    series[self._memory, (name, device, state)] = count
        for (gauge, labels), value in series.items():
            gauge.labels(*labels).set(value)
        for gauge, labels in self._shown - set(series):
            gauge.remove(*labels)
        self._shown = set(series)


def _states(memory: DeviceMemory) -> dict[str, int]:
    return {
        "total": memory.device.total_bytes,
        "used": memory.device.total_bytes - memory.device.free_bytes,
        "reserved": memory.reserved_bytes,
        "free": memory.usage.free,
    }


def set_counts(gauge: Gauge, values: Iterable[str], every: type[StrEnum]) -> None:
    """Set one series per member of `every`; members that do not occur get 0."""
    counts = Counts(values)
    for value in every:
        gauge.labels(value).set(counts[value])
