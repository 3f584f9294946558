"""The cluster's current state: nodes, their GPUs, free memory, load, and the links between GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from placement.types import Scope
from profiler.types import DeviceRates

BUSY_ABOVE = 0.01  # a sample with more utilisation than this counts as busy
LOAD_WINDOW = 120  # one-second samples
MAX_NAMED = 8  # nodes or GPUs in one message


class Link(IntEnum):
    """The kind of link between two GPUs, fastest first."""

    FAST = 0  # within an NVLink domain, or an equally fast link
    NODE = 1  # within a node: PCIe
    NETWORK = 2  # between nodes


@dataclass(frozen=True)
class GpuType:
    """What all GPUs of one type sustain: bytes/s of memory, FLOP/s at the model's precision.

    A `shared` type is a CPU host: all ranks of a deployment run on one host and share its cores and memory.
    All types of a cluster are shared, or none is. `kind` is the name of such devices in a placement; if it is
    empty, `name` is used.
    """

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    shared: bool = False
    kind: str = ""

    def rates(self, ranks: int) -> DeviceRates:
        """The rates of each of a stage's `ranks`: on a host they share its rates, a GPU serves one rank."""
        share = ranks if self.shared else 1
        return DeviceRates(self.memory_bytes_per_s / share, self.flops_per_s / share)


@dataclass(frozen=True)
class Resident:
    """One rank on a GPU: layers [layer_start, layer_end) of `deployment`, its bytes.

    `group` is its deployment's anti-affinity group, empty if it has none; `scope` is what deployments of that
    group must not share. `utilisation` is the busy share of its stage under the expected rate; ranks of a
    stage that share a device have it together.
    """

    deployment: str
    layer_start: int
    layer_end: int
    memory_bytes: int
    group: str = ""
    scope: Scope = Scope.NONE
    utilisation: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """GPU `index` of its node. Ranks of several deployments may share it.

    `load` is the share of recent time in which it was busy, 0 to 1 (`load_of`). Fast links join the GPUs of a
    node with the same `nvlink_domain`. `free_bytes` already excludes `residents`.
    """

    index: int
    type: str
    total_bytes: int
    free_bytes: int
    load: float = 0.0
    nvlink_domain: int = 0
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True)
class Node:
    """A node. `residents` are ranks on its devices of other types, which this cluster does not include."""

    name: str
    gpus: tuple[Gpu, ...]
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """`link_bytes_per_s` has the bandwidth of each kind of link: fast, node, network."""

    nodes: tuple[Node, ...]
    types: tuple[GpuType, ...]
    link_bytes_per_s: tuple[float, float, float]

    def __post_init__(self) -> None:
        """Check the cluster. Raises ValueError if it is impossible."""
        _unique("node", [node.name for node in self.nodes])
        known = _unique("GPU type", [kind.name for kind in self.types])
        if any(not kind.memory_bytes_per_s > 0 or not kind.flops_per_s > 0 for kind in self.types):
            raise ValueError("expected positive rates for every GPU type")
        if len({kind.shared for kind in self.types}) > 1:
            raise ValueError(
                "expected either GPUs or CPU hosts, got both; describe only GPUs or only CPU hosts"
            )
        fast, within, between = self.link_bytes_per_s
        if not fast >= within >= between > 0:
            raise ValueError(f"expected bandwidths fast >= node >= network > 0, got {self.link_bytes_per_s}")
        for node in self.nodes:
            _unique(f"GPU of node {node.name}", [gpu.index for gpu in node.gpus])
            for gpu in node.gpus:
                _check(f"GPU {gpu.index} of node {node.name}", gpu, known)

    @property
    def gpu_count(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)


def load_of(utilisation: Sequence[float], window: int = LOAD_WINDOW) -> float:
    """A GPU's load from one-second samples of its utilisation (0 to 1), oldest first (MaverIQ, section 6)."""
    recent = utilisation[-window:] if window > 0 else ()
    return sum(sample > BUSY_ABOVE for sample in recent) / len(recent) if recent else 0.0


def utilisation_of(ranks: Iterable[Resident]) -> float:
    """The share of time in which one deployment's ranks keep their device busy."""
    return sum({rank.layer_start: rank.utilisation for rank in ranks}.values())


def with_gpus(cluster: Cluster, changed: dict[tuple[str, int], Gpu]) -> Cluster:
    """The cluster with some GPUs, by node and index, replaced."""
    touched = {node for node, _ in changed}
    nodes = tuple(
        replace(node, gpus=tuple(changed.get((node.name, gpu.index), gpu) for gpu in node.gpus))
        if node.name in touched
        else node
        for node in cluster.nodes
    )
    made = object.__new__(Cluster)  # skips the checks, which were made before: 10,000 GPUs take a while
    for name, value in (
        ("nodes", nodes),
        ("types", cluster.types),
        ("link_bytes_per_s", cluster.link_bytes_per_s),
    ):
        object.__setattr__(made, name, value)
    return made


def _unique(what: str, names: Sequence[object]) -> set[object]:
    distinct = set(names)
    if len(distinct) != len(names):
        twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
        raise ValueError(
            f"{what} {', '.join(twice[:MAX_NAMED])} is listed twice; give each its own name or index"
        )
    return distinct


def _check(where: str, gpu: Gpu, types: set[object]) -> None:
    if gpu.type not in types:
        known = ", ".join(sorted(map(str, types))) or "none"
        raise ValueError(
            f"{where} has the unknown type {gpu.type!r}; use one of {known}, or add the type's rates under "
            "types"
        )
    if gpu.total_bytes <= 0 or not 0 <= gpu.free_bytes <= gpu.total_bytes:
        raise ValueError(
            f"{where} has {gpu.free_bytes} of {gpu.total_bytes} bytes free; "
            "expected 0 <= free <= total, total > 0"
        )
    if not 0 <= gpu.load <= 1:
        raise ValueError(f"{where} has load {gpu.load}; expected a share of time, from 0 to 1")
