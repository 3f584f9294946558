"""The GPUs of a cluster that can run a model in each of its compressions (`profiler.capabilities`). Pure.

Each set of GPU types that runs the same compressions is searched separately, with these GPUs and compressions
only; the best placement of all searches wins. If every GPU runs all compressions, there is one search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from placement.solver.cluster import Cluster, GpuType, Node
from placement.solver.default_estimator import EstimatorFor, estimator_of
from placement.solver.places import Shared
from placement.solver.policies.base import Policy
from placement.solver.request import Compression, ModelFigures, Request
from placement.types import Placement
from profiler.capabilities import gpu_problem


class AbleDevices:
    """The searches of one decision."""

    def __init__(self, cluster: Cluster, policy: Policy, estimator_for: EstimatorFor = estimator_of) -> None:
        self._cluster, self._policy, self._estimator_for = cluster, policy, estimator_for
        self._shared: dict[frozenset[str], Shared] = {}
        self._models: dict[int, tuple[ModelFigures, dict[frozenset[str], ModelFigures]]] = {}

    def parts(self, request: Request) -> Iterator[tuple[Shared, Request]]:
        """Parts of the cluster and the request, those with most GPUs first. Empty if no GPU runs the
        model."""
        for types, model in self._parts_of(request.model).items():
            if types not in self._shared:
                self._shared[types] = Shared(_of_types(self._cluster, types), self._estimator_for)
            whole = model is request.model
            yield self._shared[types], request if whole else replace(request, model=model)

    def search(self, request: Request) -> Placement | None:
        """The policy's best placement."""
        found = [self._policy.search(shared, asked) for shared, asked in self.parts(request)]
        placements = [placement for placement in found if placement is not None]
        return min(placements, key=lambda placement: placement.choice.objective, default=None)

    def fits(self, request: Request) -> bool:
        """Whether `search` finds a placement."""
        return any(self._policy.fits(shared, asked) for shared, asked in self.parts(request))

    def _parts_of(self, model: ModelFigures) -> dict[frozenset[str], ModelFigures]:
        # The model is stored as well, so that it stays alive and no other model gets its id.
        if id(model) not in self._models:
            self._models[id(model)] = model, _parts(self._cluster, model)
        _, parts = self._models[id(model)]
        return parts

    def problem(self, request: Request) -> str:
        """Why no GPU runs any of the request's compressions."""
        pairs = [(c.name, kind.name) for c in request.model.compressions for kind in self._cluster.types]
        return "; ".join(filter(None, (gpu_problem(name, gpu) for name, gpu in pairs)))


def _parts(cluster: Cluster, model: ModelFigures) -> dict[frozenset[str], ModelFigures]:
    by_types: dict[frozenset[str], list[Compression]] = {}
    for compression in model.compressions:
        types = frozenset(kind.name for kind in cluster.types if _runs(compression, kind))
        if types or not cluster.types:
            by_types.setdefault(types, []).append(compression)
    if len(by_types) == 1 and len(*by_types.values()) == len(model.compressions):
        return dict.fromkeys(by_types, model)
    widest_first = sorted(by_types, key=len, reverse=True)
    return {types: replace(model, compressions=tuple(by_types[types])) for types in widest_first}


def _runs(compression: Compression, kind: GpuType) -> bool:
    return kind.shared or gpu_problem(compression.name, kind.name) is None


def _of_types(cluster: Cluster, types: frozenset[str]) -> Cluster:
    if types == {kind.name for kind in cluster.types}:
        return cluster
    kept = tuple(kind for kind in cluster.types if kind.name in types)
    return replace(cluster, nodes=tuple(_node_of(node, types) for node in cluster.nodes), types=kept)


def _node_of(node: Node, types: frozenset[str]) -> Node:
    """The node without other types of GPUs; their residents still count for anti-affinity among nodes."""
    others = (resident for gpu in node.gpus if gpu.type not in types for resident in gpu.residents)
    gpus = tuple(gpu for gpu in node.gpus if gpu.type in types)
    return Node(node.name, gpus, (*node.residents, *others))
