"""What every policy is, and how its answer is put."""

from __future__ import annotations

from typing import Protocol

from placement.solver.cluster import Cluster
from placement.solver.estimators import estimator_of
from placement.solver.plan import Estimator
from placement.solver.request import Request
from placement.types import Placement


class EstimatorFor(Protocol):
    """Makes the estimator of one request on one cluster; `estimator_of` is one."""

    def __call__(self, cluster: Cluster, request: Request) -> Estimator: ...


class Policy(Protocol):
    """A pure search: equal arguments give equal answers, nothing is changed, and it always ends."""

    @property
    def name(self) -> str: ...

    def find(
        self, cluster: Cluster, request: Request, estimator_for: EstimatorFor = estimator_of
    ) -> Placement | None:
        """The best placement by this policy that keeps every limit; None if it finds none."""
        ...
