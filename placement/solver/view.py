"""A cluster as arrays, one entry per GPU, as one request sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.solver.cluster import Cluster, GpuType, Resident
from placement.solver.request import Request
from placement.types import Scope

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_LOAD = 0.95  # a GPU that is always busy still gives a newcomer a share


@dataclass(frozen=True)
class View:
    """The GPUs that the request may use. Each `nvlink_domain` is of one node; `slowdown` is
    1 / (1 - load).

    `shared`: they are CPU hosts, each of which carries all ranks or none.
    """

    names: tuple[tuple[str, int], ...]  # node, index
    types: tuple[GpuType, ...]
    node: Ints
    type: Ints
    nvlink_domain: Ints
    free: Ints
    total: Ints
    usable: Ints
    load: Floats
    slowdown: Floats

    @property
    def shared(self) -> bool:
        return any(kind.shared for kind in self.types)

    @property
    def type_names(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.types)

    def __len__(self) -> int:
        return len(self.names)


def slowdown_of(load: float) -> float:
    return 1 / (1 - min(load, MAX_LOAD))


def busier(load: float, utilisation: float) -> float:
    """A device's load with work that keeps it busy for this share of time, the slowdown by `load` counted."""
    return min(1.0, load + utilisation / slowdown_of(load))


def view_of(cluster: Cluster, request: Request) -> View:
    """Without the GPUs or nodes that the request's anti-affinity forbids."""
    types = {kind.name: number for number, kind in enumerate(cluster.types)}
    domains: dict[tuple[int, int], int] = {}
    names, rows = [], []
    for number, node in enumerate(cluster.nodes):
        apart = [_scopes(request, gpu.residents) for gpu in node.gpus]
        if any(Scope.NODE in scopes for scopes in (*apart, _scopes(request, node.residents))):
            continue
        for gpu, scopes in zip(node.gpus, apart, strict=True):
            if Scope.GPU in scopes:
                continue
            domain = domains.setdefault((number, gpu.nvlink_domain), len(domains))
            usable = gpu.free_bytes - int(request.headroom * gpu.total_bytes)
            names.append((node.name, gpu.index))
            rows.append((number, types[gpu.type], domain, gpu.free_bytes, gpu.total_bytes, usable, gpu.load))
    columns = list(zip(*rows, strict=True)) or [()] * 7
    ints = [np.array(column, dtype=np.int64) for column in columns[:6]]
    load = np.array(columns[6], dtype=np.float64)
    at_node, of_type, in_domain, free, total, can_use = ints
    slowdown: Floats = 1 / (1 - np.minimum(load, MAX_LOAD))
    return View(
        tuple(names), cluster.types, at_node, of_type, in_domain, free, total, can_use, load, slowdown
    )


def _scopes(request: Request, residents: Sequence[Resident]) -> set[Scope]:
    """What the request and the residents of its group do not share: the strictest of them all holds."""
    mates = [resident for resident in residents if request.group and resident.group == request.group]
    return {request.scope, *(resident.scope for resident in mates)} if mates else set()
