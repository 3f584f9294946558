"""The paper's server, and what tensor parallelism costs on it.

The product's estimates take an all-reduce's start from H200s whose GPUs are all joined by NVLink: 14.5 us,
however many they are (`h200`). The paper's A6000s are joined in pairs, and beyond a pair by PCIe. `pcie`
takes 5 us for each of a ring's 2 (n - 1) steps of more than two GPUs, so 30 us for four and 70 us for eight:
rough, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from benchmarks.placement_instances import paper_cluster
from placement.solver.cluster import Cluster, GpuType, Link
from placement.solver.estimators import EstimatorFor
from placement.solver.plan import Shape
from placement.solver.request import Request
from placement.solver.roofline import ALLREDUCES_PER_LAYER, Roofline
from profiler.roofline import ALLREDUCE_S, StageTime

RING_STEP_S = {"h200": 0.0, "pcie": 5e-6}
PAIR = 2


class OfSite(Roofline):
    """`ring_step_s` 0: the product's own. With `sequences` its batch is just so large, else by the rate."""

    def __init__(
        self, cluster: Cluster, request: Request, *, ring_step_s: float, sequences: float = 0.0
    ) -> None:
        super().__init__(cluster, request)
        self._ring_step_s, self._sequences = ring_step_s, sequences

    def batch(self, shape: Shape) -> float:
        return self._sequences or super().batch(shape)

    def _time(self, shape: Shape, kind: GpuType, link: Link, tokens: float, cached: float) -> StageTime:
        found = super()._time(shape, kind, link, tokens, cached)
        if shape.tp <= PAIR:
            return found
        longer_s = max(0.0, 2 * (shape.tp - 1) * self._ring_step_s - ALLREDUCE_S)
        return replace(found, layer_s=found.layer_s + ALLREDUCES_PER_LAYER * longer_s)


@dataclass(frozen=True)
class Site:
    """`links` is one of RING_STEP_S; `idle` has nothing on it."""

    links: str
    idle: Cluster

    @property
    def estimator_for(self) -> EstimatorFor:
        return partial(OfSite, ring_step_s=RING_STEP_S[self.links])

    def estimator(self, request: Request, sequences: float = 0.0) -> OfSite:
        return OfSite(self.idle, request, ring_step_s=RING_STEP_S[self.links], sequences=sequences)


def paper_site(links: str) -> Site:
    return Site(links, paper_cluster())
