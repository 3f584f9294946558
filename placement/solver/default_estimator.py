"""The default estimator of a request."""

from __future__ import annotations

from typing import Protocol

from placement.solver.cluster import Cluster
from placement.solver.plan import Estimator
from placement.solver.profiled import Profiled
from placement.solver.request import Request
from placement.solver.roofline import Roofline


class EstimatorFor(Protocol):
    """Makes the estimator of one request on one cluster; `estimator_of` is an example.

    It may read the request's model and load, but not its limits.
    """

    def __call__(self, cluster: Cluster, request: Request) -> Estimator: ...


def estimator_of(cluster: Cluster, request: Request) -> Estimator:
    """The profiler's estimator for a model read from its config, the roofline for explicit figures."""
    return Roofline(cluster, request) if request.model.spec is None else Profiled(cluster, request)
