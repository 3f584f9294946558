"""The interface of policies."""

from __future__ import annotations

from typing import Protocol

from placement.solver.cluster import Cluster
from placement.solver.default_estimator import EstimatorFor, estimator_of
from placement.solver.places import Shared
from placement.solver.request import Request
from placement.types import Placement

__all__ = ["EstimatorFor", "Policy"]


class Policy(Protocol):
    """A pure search: equal arguments give equal answers, nothing is changed, and it always ends."""

    @property
    def name(self) -> str: ...

    def search(self, shared: Shared, request: Request) -> Placement | None:
        """This policy's best placement that keeps every limit; None if it finds none."""
        ...

    def fits(self, shared: Shared, request: Request) -> bool:
        """Whether `search` finds a placement."""
        return self.search(shared, request) is not None

    def find(
        self, cluster: Cluster, request: Request, estimator_for: EstimatorFor = estimator_of
    ) -> Placement | None:
        """As `search`, for one request alone."""
        return self.search(Shared(cluster, estimator_for), request)
