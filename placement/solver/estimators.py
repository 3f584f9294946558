"""Which estimator a request gets when nobody brings one."""

from __future__ import annotations

from placement.solver.cluster import Cluster
from placement.solver.plan import Estimator
from placement.solver.profiled import Profiled
from placement.solver.request import Request
from placement.solver.roofline import Roofline


def estimator_of(cluster: Cluster, request: Request) -> Estimator:
    """The profiler's for a model read from its config, the roofline for explicit figures."""
    return Roofline(cluster, request) if request.model.spec is None else Profiled(cluster, request)
