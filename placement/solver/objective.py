"""The value that an intent minimises, and the SLOs that a candidate breaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placement.solver.memory import total_bytes
from placement.solver.plan import Estimator, Figures, Shape
from placement.solver.request import Request
from placement.types import Constraint, CostMeasure, Intent

GIB = 2**30
ROUNDING = 1e-9  # relative; bounds and layouts' figures are summed in different orders
UNITS = {
    CostMeasure.MEMORY_LATENCY: "GiB s",
    CostMeasure.MEMORY: "GiB",
    CostMeasure.GPU_HOURS: "GPU h",
}
_MEASURES = {Intent.MIN_MEMORY: CostMeasure.MEMORY, Intent.MIN_GPU_HOURS: CostMeasure.GPU_HOURS}


def cost(measure: CostMeasure, ranks: int, memory_bytes: int, latency_s: float) -> float:
    """The cost of one request, with `memory_bytes` on all ranks together."""
    match measure:
        case CostMeasure.MEMORY:
            return memory_bytes / GIB
        case CostMeasure.GPU_HOURS:
            return ranks * latency_s / 3600
        case CostMeasure.MEMORY_LATENCY:
            return memory_bytes / GIB * latency_s


def objective(request: Request, shape: Shape, figures: Figures) -> float:
    """The objective. For one shape it never falls when latency rises: the fastest layout is the best."""
    return _objective(request, shape, shape.tp * sum(figures.memory_bytes), figures.latency_s)


def min_objective(request: Request, shape: Shape, estimator: Estimator, latency_s: float) -> float:
    """The least objective of any layout of this shape with at least this latency; even stages need least
    memory."""
    if request.intent is Intent.MIN_LATENCY:
        return latency_s
    memory_bytes = total_bytes(estimator, shape, request.model.layers)
    return _objective(request, shape, memory_bytes, latency_s)


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds of the seconds of any layout of a shape."""

    ttft_s: float
    tpot_s: float
    latency_s: float


@dataclass(frozen=True)
class StepLimits:
    """Seconds that stages and hops may take for a prompt and for a token; infinite without a limit.

    Within a shape only these limits can exclude a layout and still allow a slower one.
    """

    prompt_s: float
    token_s: float


def limits_of(request: Request, estimator: Estimator) -> StepLimits:
    """The limits with room for rounding; `excesses` decides about candidates that only just break a limit."""
    ttft_s, tpot_s = (
        float("inf") if limit is None else limit * (1 + ROUNDING)
        for limit in (request.slos.ttft_s, request.slos.tpot_s)
    )
    return StepLimits(ttft_s - estimator.path_s, tpot_s)


def max_latency_s(request: Request, shape: Shape, estimator: Estimator) -> float:
    """Seconds of a request's stages and hops beyond which every layout of this shape breaks a limit."""
    slos, most = request.slos, float("inf")
    if slos.latency_s is not None:
        most = slos.latency_s
    if slos.cost is not None:
        memory_bytes = total_bytes(estimator, shape, request.model.layers)
        each = cost(request.cost, shape.ranks, memory_bytes, 1.0)
        if request.cost is not CostMeasure.MEMORY and each > 0:
            most = min(most, slos.cost / each)
    return most * (1 + ROUNDING) - estimator.path_s


def is_limited(request: Request) -> bool:
    """Whether there is a limit that `out_of_reach` checks."""
    slos = request.slos
    return (slos.latency_s, slos.ttft_s, slos.tpot_s, slos.cost) != (None,) * 4


def out_of_reach(request: Request, shape: Shape, estimator: Estimator, bounds: LowerBounds) -> bool:
    """Whether every layout of this shape breaks a limit, by lower bounds alone; some such shapes are
    missed."""
    spent = 0.0
    if request.slos.cost is not None:
        memory_bytes = total_bytes(estimator, shape, request.model.layers)
        spent = cost(request.cost, shape.ranks, memory_bytes, bounds.latency_s)
    return any(value > limit * (1 + ROUNDING) for _, limit, value in _limits(request, bounds, spent))


def _objective(request: Request, shape: Shape, memory_bytes: int, latency_s: float) -> float:
    if request.intent is Intent.MIN_LATENCY:
        return latency_s
    return cost(_MEASURES.get(request.intent, request.cost), shape.ranks, memory_bytes, latency_s)


def unit(request: Request) -> str:
    if request.intent is Intent.MIN_LATENCY:
        return "s"
    return UNITS[_MEASURES.get(request.intent, request.cost)]


def excesses(request: Request, shape: Shape, figures: Figures) -> dict[Constraint, tuple[float, float]]:
    """The broken limits, each with its value and this candidate's value."""
    limits, memory_bytes = request.slos, shape.tp * sum(figures.memory_bytes)
    spent = cost(request.cost, shape.ranks, memory_bytes, figures.latency_s)
    at_most = _limits(request, figures, spent)
    broken = {name: (bound, value) for name, bound, value in at_most if value > bound}
    if limits.accuracy is not None and shape.compression.accuracy < limits.accuracy:
        broken[Constraint.ACCURACY] = (limits.accuracy, shape.compression.accuracy)
    if request.rate_per_s > figures.throughput_per_s:
        broken[Constraint.RATE] = (request.rate_per_s, figures.throughput_per_s)
    return broken


def _limits(
    request: Request, figures: Figures | LowerBounds, spent: float
) -> Iterator[tuple[Constraint, float, float]]:
    """Each limited quantity, its limit, and its value in these figures."""
    limits = request.slos
    for name, bound, value in (
        (Constraint.LATENCY, limits.latency_s, figures.latency_s),
        (Constraint.TTFT, limits.ttft_s, figures.ttft_s),
        (Constraint.TPOT, limits.tpot_s, figures.tpot_s),
        (Constraint.COST, limits.cost, spent),
    ):
        if bound is not None:
            yield name, bound, value
