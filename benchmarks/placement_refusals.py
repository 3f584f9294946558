"""Requests that large clusters refuse, one kind for each constraint that may be in the way. For
`benchmarks.placement`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks import placement_instances as instances
from placement.solver.cluster import Cluster, Node, Resident
from placement.solver.policies.joint import Joint
from placement.solver.request import Request
from placement.types import Intent, Placement, Scope, Slos

FRAGMENTS = (2, 8)  # GiB free of each GPU
CRUMBS = (0.1, 0.4)
SHORT = 0.9  # of what the best placement takes
BEYOND_RATE = 1e6  # requests each second
BEYOND_MEMORY = 100_000  # sequences


@dataclass(frozen=True)
class Fragments:
    """A cluster in fragments, and what is asked of it."""

    size: int
    models: int
    requests: Sequence[Request]

    @cached_property
    def cluster(self) -> Cluster:
        return instances.large_cluster(random.Random(self.size), self.size, self.models, FRAGMENTS)

    @cached_property
    def crumbs(self) -> Cluster:
        return instances.large_cluster(random.Random(self.size), self.size, self.models, CRUMBS)

    @cached_property
    def shared(self) -> Cluster:
        """With a deployment on every node that shares none with others of its group."""
        nodes = (replace(node, residents=(mate(node),)) for node in self.cluster.nodes)
        return replace(self.cluster, nodes=tuple(nodes))

    @cached_property
    def fastest(self) -> list[Placement | None]:
        return [self._best(replace(request, intent=Intent.MIN_LATENCY)) for request in self.requests]

    @cached_property
    def cheapest(self) -> list[Placement | None]:
        return [self._best(replace(request, intent=Intent.MIN_COST)) for request in self.requests]

    def _best(self, request: Request) -> Placement | None:
        return Joint().find(self.cluster, request)

    def limited(self) -> Iterator[tuple[Request, Placement, Placement]]:
        """With the fastest and the cheapest placement: the requests that have one."""
        for request, fastest, cheapest in zip(self.requests, self.fastest, self.cheapest, strict=True):
            if fastest is not None and cheapest is not None:
                yield request, fastest, cheapest

    def each(self, **changes: object) -> list[Request]:
        return [replace(request, **changes) for request in self.requests]  # type: ignore[arg-type]


def mate(node: Node) -> Resident:
    return Resident(f"mate-{node.name}", 0, 1, 0, "pair", Scope.NODE)


Asked = tuple[Cluster, list[Request]]


def _memory(on: Fragments) -> Asked:
    return on.crumbs, list(on.requests)


def _sequences(on: Fragments) -> Asked:
    """The weights fit, not all sequences."""
    return on.cluster, on.each(concurrency=BEYOND_MEMORY)


def _headroom(on: Fragments) -> Asked:
    return on.cluster, on.each(headroom=0.2)


def _ttft(on: Fragments) -> Asked:
    return on.cluster, [replace(r, slos=Slos(ttft_s=SHORT * p.estimate.ttft_s)) for r, p, _ in on.limited()]


def _tpot(on: Fragments) -> Asked:
    return on.cluster, [replace(r, slos=Slos(tpot_s=SHORT * p.estimate.tpot_s)) for r, p, _ in on.limited()]


def _latency(on: Fragments) -> Asked:
    return on.cluster, [
        replace(r, slos=Slos(latency_s=SHORT * p.choice.latency_s)) for r, p, _ in on.limited()
    ]


def _cost(on: Fragments) -> Asked:
    return on.cluster, [replace(r, slos=Slos(cost=SHORT * p.choice.objective)) for r, _, p in on.limited()]


def _accuracy(on: Fragments) -> Asked:
    """Of models in three compressions, none of which is registered for so much."""
    every = [replace(r, model=instances.model(r.model.name)) for r in on.requests]
    return on.cluster, [replace(r, slos=Slos(accuracy=2.0)) for r in every]


def _rate(on: Fragments) -> Asked:
    return on.cluster, on.each(rate_per_s=BEYOND_RATE)


def _anti_affinity(on: Fragments) -> Asked:
    return on.shared, on.each(group="pair", scope=Scope.NODE)


def _degrees(on: Fragments) -> Asked:
    """On one GPU, which holds none of the models."""
    return on.cluster, on.each(only_tp=(1,), only_pp=(1,))


def _several(on: Fragments) -> Asked:
    """Each alone is enough to be refused."""
    asked = [
        replace(r, rate_per_s=BEYOND_RATE, headroom=0.05, slos=Slos(ttft_s=SHORT * p.estimate.ttft_s))
        for r, p, _ in on.limited()
    ]
    return on.cluster, asked


KINDS: dict[str, Callable[[Fragments], Asked]] = {
    "memory": _memory,
    "sequences": _sequences,
    "headroom": _headroom,
    "TTFT": _ttft,
    "TPOT": _tpot,
    "latency": _latency,
    "cost": _cost,
    "accuracy": _accuracy,
    "rate": _rate,
    "anti-affinity": _anti_affinity,
    "TP and PP": _degrees,
    "rate, headroom, TTFT": _several,
}
