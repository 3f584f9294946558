"""One decision: a policy's placement, or which constraint binds and what the nearest relaxations are.

A constraint binds when a placement exists without it. Each is lifted alone; what the policy then finds says
how far the request is from being met. The number of searches is bounded: one per constraint that is set, a
few for the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from placement.choose import rounded
from placement.solver.cluster import Cluster
from placement.solver.memory import total_bytes
from placement.solver.objective import GIB, cost
from placement.solver.outcome import Constraint, NotPlaced, Outcome, Placed, Relaxation
from placement.solver.policies.base import EstimatorFor, Policy
from placement.solver.request import CostMeasure, Goal, Limits, Request, Scope
from placement.solver.roofline import Roofline
from placement.solver.shapes import shapes
from placement.solver.view import view_of

RATE_STEPS = 6  # halvings of the interval between a rate that works and one that does not
WIDEST = 64

Find = Callable[[Request], Placed | None]


def decide(
    cluster: Cluster, request: Request, policy: Policy, estimator_for: EstimatorFor = Roofline
) -> Outcome:
    """Never empty-handed: `NotPlaced` names a constraint and, where one exists, what would do."""

    def find(asked: Request) -> Placed | None:
        return policy.find(cluster, asked, estimator_for)

    return find(request) or _why_not(cluster, request, find)


def _why_not(cluster: Cluster, request: Request, find: Find) -> NotPlaced:
    found = sorted(_relaxations(cluster, request, find), key=lambda r: r.factor)
    if found:
        return NotPlaced(
            request.name, found[0].constraint, f"{found[0].constraint} binds: {found[0].text}", tuple(found)
        )
    together = _together(request, find)
    if together is not None:
        return NotPlaced(
            request.name,
            together[0].constraint,
            "no limit alone is in the way, but all of them together: " + "; ".join(r.text for r in together),
            together,
        )
    return _no_memory(cluster, request, find)


def _relaxations(cluster: Cluster, request: Request, find: Find) -> Iterator[Relaxation]:
    """Of each constraint that is set, lifted alone: what would do."""
    for lifted in _lifted(request):
        found = find(lifted.request)
        if found is not None:
            yield _relaxation(lifted, lifted.offered(found))
    accuracy = _accuracy(request, find)
    if accuracy is not None:
        yield accuracy
    rate = _rate(request, find)
    if rate is not None:
        yield rate
    if request.max_tp * request.max_pp < cluster.gpu_count:
        wide = replace(request, max_tp=WIDEST, max_pp=WIDEST)
        found = find(wide)
        if found is not None:
            ranks = found.shape.ranks
            text = f"allow TP={found.shape.tp} x PP={found.shape.pp}"
            most = request.max_tp * request.max_pp
            yield Relaxation(Constraint.PARALLELISM, most, ranks, max(1.0, ranks / most), text)


@dataclass(frozen=True)
class _Lifted:
    """A request without one constraint, and the value of it that a placement offers instead."""

    constraint: Constraint
    asked: float
    request: Request
    offered: Callable[[Placed], float]
    text: str  # with {asked} and {offered}


def _lifted(request: Request) -> Iterator[_Lifted]:
    limits = request.limits
    for constraint, offered, unit, goal in (
        (Constraint.LATENCY, lambda p: p.figures.latency_s, " s", Goal.MIN_LATENCY),
        (Constraint.TTFT, lambda p: p.figures.ttft_s, " s", Goal.MIN_LATENCY),
        (Constraint.TPOT, lambda p: p.figures.tpot_s, " s", Goal.MIN_LATENCY),
        (Constraint.COST, lambda p: _cost(request, p), " " + _cost_unit(request), Goal.MIN_COST),
    ):
        asked = getattr(limits, constraint)
        if asked is not None:
            without = replace(request, goal=goal, limits=replace(limits, **{constraint: None}))
            text = f"raise {constraint} from {{asked:.4g}} to {{offered:.4g}}{unit}"
            yield _Lifted(constraint, asked, without, offered, text)
    if request.headroom > 0:
        without = replace(request, headroom=0.0)
        yield _Lifted(
            Constraint.HEADROOM,
            request.headroom,
            without,
            lambda _: 0.0,
            "leave no headroom instead of {asked:.0%}",
        )
    if request.scope is not Scope.NONE:
        without = replace(request, scope=Scope.NONE)
        text = f"let copies of group {request.group} share a {request.scope}"
        yield _Lifted(Constraint.ANTI_AFFINITY, 1.0, without, lambda _: 1.0, text)


def _relaxation(lifted: _Lifted, offered: float) -> Relaxation:
    asked = lifted.asked
    factor = max(1.0, offered / asked) if offered > 0 and asked > 0 else 1.0
    text = lifted.text.format(asked=asked, offered=rounded(offered, up=True))
    if factor > 1:
        text += f" ({factor:.3g} times)"
    return Relaxation(lifted.constraint, asked, offered, factor, text)


def _accuracy(request: Request, find: Find) -> Relaxation | None:
    """The most accurate compression below the limit that can be placed."""
    asked = request.limits.accuracy
    if asked is None:
        return None
    below = sorted({c.accuracy for c in request.model.compressions if c.accuracy < asked}, reverse=True)
    for accuracy in below:
        if find(replace(request, limits=replace(request.limits, accuracy=accuracy))) is not None:
            text = f"accept an accuracy of {accuracy:.4g} instead of {asked:.4g}"
            factor = asked / accuracy if accuracy > 0 else float("inf")
            return Relaxation(Constraint.ACCURACY, asked, accuracy, factor, text)
    return None


def _rate(request: Request, find: Find) -> Relaxation | None:
    """A rate that one copy keeps up with, to within 1/64 of the one asked."""
    if request.rate_per_s <= 0 or find(replace(request, rate_per_s=0.0)) is None:
        return None
    low, high = 0.0, request.rate_per_s
    for _ in range(RATE_STEPS):
        middle = (low + high) / 2
        if find(replace(request, rate_per_s=middle)) is None:
            high = middle
        else:
            low = middle
    shown = rounded(low, up=False)
    text = f"one copy keeps up with {shown:.4g} of {request.rate_per_s:.4g} requests/s: place more copies"
    return Relaxation(
        Constraint.RATE, request.rate_per_s, low, request.rate_per_s / low if low else float("inf"), text
    )


def _together(request: Request, find: Find) -> tuple[Relaxation, ...] | None:
    """Every limit lifted at once: by how much the fastest placement then breaks each."""
    free = replace(
        request, goal=Goal.MIN_LATENCY, limits=Limits(), headroom=0.0, scope=Scope.NONE, rate_per_s=0.0
    )
    found = find(free)
    if found is None:
        return None
    relaxed = [_relaxation(lifted, lifted.offered(found)) for lifted in _lifted(request)]
    accuracy, offered = request.limits.accuracy, found.shape.compression.accuracy
    if accuracy is not None and offered < accuracy:
        text = f"accept an accuracy of {offered:.4g} instead of {accuracy:.4g}"
        relaxed.append(
            Relaxation(Constraint.ACCURACY, accuracy, offered, accuracy / max(offered, 1e-9), text)
        )
    if request.rate_per_s > found.figures.throughput_per_s:
        rate = found.figures.throughput_per_s
        text = f"expect {rate:.4g} instead of {request.rate_per_s:.4g} requests/s"
        relaxed.append(Relaxation(Constraint.RATE, request.rate_per_s, rate, request.rate_per_s / rate, text))
    broken = [
        r for r in relaxed if r.factor > 1 or r.constraint in {Constraint.HEADROOM, Constraint.ANTI_AFFINITY}
    ]
    return tuple(broken) or None


def _no_memory(cluster: Cluster, request: Request, find: Find) -> NotPlaced:
    view = view_of(cluster, request)
    if not len(view):
        return NotPlaced(request.name, Constraint.MEMORY, "the cluster has no GPU; add one")
    needs = [total_bytes(request, shape) for shape in shapes(request, len(view))]
    free, largest = sum(view.usable.tolist()), max(view.usable.tolist())
    reason = (
        f"memory: the smallest plan needs {min(needs) / GIB:.2f} GiB over all ranks; {free / GIB:.2f} GiB "
        f"are free on {len(view)} GPUs, {largest / GIB:.2f} GiB at most on one"
    )
    few = replace(request, concurrency=1)
    if request.concurrency > 1 and find(few) is not None:
        text = f"hold 1 sequence at a time instead of {request.concurrency}"
        one = Relaxation(Constraint.MEMORY, request.concurrency, 1, float(request.concurrency), text)
        return NotPlaced(request.name, Constraint.MEMORY, reason, (one,))
    return NotPlaced(request.name, Constraint.MEMORY, reason)


def _cost(request: Request, found: Placed) -> float:
    return cost(request, found.shape, found.figures.latency_s)


def _cost_unit(request: Request) -> str:
    return {CostMeasure.MEMORY_LATENCY: "GiB s", CostMeasure.MEMORY: "GiB", CostMeasure.GPU_HOURS: "GPU h"}[
        request.cost
    ]
