"""What an intent minimises, and which SLOs a candidate breaks."""

from __future__ import annotations

from placement.solver.memory import total_bytes
from placement.solver.outcome import Constraint
from placement.solver.plan import Figures, Shape
from placement.solver.request import CostMeasure, Goal, Request

GIB = 2**30
_UNITS = {
    CostMeasure.MEMORY_LATENCY: "GiB s",
    CostMeasure.MEMORY: "GiB",
    CostMeasure.GPU_HOURS: "GPU h",
}
_MEASURES = {Goal.MIN_MEMORY: CostMeasure.MEMORY, Goal.MIN_GPU_HOURS: CostMeasure.GPU_HOURS}


def cost(request: Request, shape: Shape, latency_s: float, measure: CostMeasure | None = None) -> float:
    """Of one request, by the request's cost measure or another."""
    match measure or request.cost:
        case CostMeasure.MEMORY:
            return total_bytes(request, shape) / GIB
        case CostMeasure.GPU_HOURS:
            return shape.ranks * latency_s / 3600
        case CostMeasure.MEMORY_LATENCY:
            return total_bytes(request, shape) / GIB * latency_s


def objective(request: Request, shape: Shape, latency_s: float) -> float:
    """For one shape it never falls when latency rises: the fastest layout of a shape is its best."""
    if request.goal is Goal.MIN_LATENCY:
        return latency_s
    return cost(request, shape, latency_s, _MEASURES.get(request.goal))


def unit(request: Request) -> str:
    if request.goal is Goal.MIN_LATENCY:
        return "s"
    return _UNITS[_MEASURES.get(request.goal, request.cost)]


def excesses(request: Request, shape: Shape, figures: Figures) -> dict[Constraint, tuple[float, float]]:
    """The limits that are broken: what was asked, and what this candidate offers."""
    limits = request.limits
    at_most = (
        (Constraint.LATENCY, limits.latency_s, figures.latency_s),
        (Constraint.TTFT, limits.ttft_s, figures.ttft_s),
        (Constraint.TPOT, limits.tpot_s, figures.tpot_s),
        (Constraint.COST, limits.cost, cost(request, shape, figures.latency_s)),
    )
    broken = {name: (bound, value) for name, bound, value in at_most if bound is not None and value > bound}
    if limits.accuracy is not None and shape.compression.accuracy < limits.accuracy:
        broken[Constraint.ACCURACY] = (limits.accuracy, shape.compression.accuracy)
    if request.rate_per_s > figures.throughput_per_s:
        broken[Constraint.RATE] = (request.rate_per_s, figures.throughput_per_s)
    return broken
