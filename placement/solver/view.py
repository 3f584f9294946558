"""A cluster as arrays with one entry per GPU, as seen by one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.solver.cluster import Cluster, Gpu, GpuType, Resident
from placement.solver.request import Request
from placement.types import Scope

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_LOAD = 0.95  # a GPU that is always busy still gives new work a share


@dataclass(frozen=True)
class View:
    """The GPUs that the request may use. Each `nvlink_domain` lies in one node; `slowdown` is 1 / (1 - load).

    `shared`: the devices are CPU hosts; each of them carries all ranks or none.
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
    """A device's load after adding work with this busy share; the slowdown by `load` is included."""
    return min(1.0, load + utilisation / slowdown_of(load))


def view_of(cluster: Cluster, request: Request) -> View:
    """The view without the GPUs or nodes that the request's anti-affinity forbids."""
    return with_headroom(whole_view(cluster, request), request.headroom)


def with_headroom(view: View, headroom: float) -> View:
    """The view with this share of each GPU's total memory left free."""
    return replace(view, usable=view.free - (headroom * view.total).astype(np.int64))


def whole_view(cluster: Cluster, request: Request) -> View:
    """As `view_of`, without headroom: all free memory is usable."""
    seen = [*_seen(cluster, request)]
    types = {kind.name: number for number, kind in enumerate(cluster.types)}
    node = np.array([number for number, _ in seen], dtype=np.int64)
    free = np.array([gpu.free_bytes for _, gpu in seen], dtype=np.int64)
    load = np.array([gpu.load for _, gpu in seen], dtype=np.float64)
    slowdown: Floats = 1 / (1 - np.minimum(load, MAX_LOAD))
    return View(
        names=tuple((cluster.nodes[number].name, gpu.index) for number, gpu in seen),
        types=cluster.types,
        node=node,
        type=np.array([types[gpu.type] for _, gpu in seen], dtype=np.int64),
        nvlink_domain=_numbered([(number, gpu.nvlink_domain) for number, gpu in seen]),
        free=free,
        total=np.array([gpu.total_bytes for _, gpu in seen], dtype=np.int64),
        usable=free,
        load=load,
        slowdown=slowdown,
    )


def _seen(cluster: Cluster, request: Request) -> Iterator[tuple[int, Gpu]]:
    """The GPUs that the request may use, with their node's number."""
    if not request.group:
        yield from ((number, gpu) for number, node in enumerate(cluster.nodes) for gpu in node.gpus)
        return
    for number, node in enumerate(cluster.nodes):
        apart = [_scopes(request, gpu.residents) for gpu in node.gpus]
        if any(Scope.NODE in scopes for scopes in (*apart, _scopes(request, node.residents))):
            continue
        for gpu, scopes in zip(node.gpus, apart, strict=True):
            if Scope.GPU not in scopes:
                yield number, gpu


def _numbered(keys: Sequence[tuple[int, int]]) -> Ints:
    """A number for each distinct key, in order of appearance."""
    numbers: dict[tuple[int, int], int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def _scopes(request: Request, residents: Sequence[Resident]) -> set[Scope]:
    """What the request and the residents of its group must not share: the strictest of their scopes holds."""
    mates = [resident for resident in residents if request.group and resident.group == request.group]
    return {request.scope, *(resident.scope for resident in mates)} if mates else set()
