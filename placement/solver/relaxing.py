"""Which constraints are in the way of a request, and by how much each would have to give. Pure.

Each is lifted alone; what is found without it says how far the request is from being met. Where none alone
is in the way all limits are lifted at once. The number of searches is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from placement.solver.numbers import rounded
from placement.solver.objective import UNITS, cost
from placement.solver.request import Request
from placement.types import Constraint, Intent, Placement, Relaxation, Scope, Slos

HALVINGS = 6  # of the interval between what works and what does not
WIDEST = 64
LEAST = 1e-9  # of what is asked; a factor stays a number
SLACK = 1 + 1e-9  # rounding must not undo what was found to suffice

_LIMITS = {Constraint.LATENCY, Constraint.TTFT, Constraint.TPOT, Constraint.COST, Constraint.ACCURACY}

Find = Callable[[Request], Placement | None]


def relaxations(request: Request, find: Find, gpus: int) -> tuple[Relaxation, ...]:
    """Of each constraint that is set, lifted alone: what would do on `gpus` GPUs; the nearest first.

    Giving up an anti-affinity is no matter of degree, and comes last.
    """
    found = [*_singles(request, find, gpus)]
    return tuple(sorted(found, key=lambda r: (r.constraint is Constraint.ANTI_AFFINITY, r.factor)))


def _singles(request: Request, find: Find, gpus: int) -> Iterator[Relaxation]:
    for lifted in _lifted(request):
        found = find(lifted.request)
        if found is not None:
            yield _relaxation(lifted, lifted.offered(found))
    for search in (_accuracy, _rate, _headroom, _scope, _memory):
        one = search(request, find)
        if one is not None:
            yield one
    wider = _parallelism(request, find, gpus)
    if wider is not None:
        yield wider


def together(request: Request, find: Find, gpus: int) -> tuple[Relaxation, ...]:
    """Every limit lifted at once: by how much the fastest placement then breaks each. () if there is none.

    Of the rate as much is kept as can be.
    """
    free = replace(request, intent=Intent.MIN_LATENCY, slos=Slos(), headroom=0.0, scope=Scope.NONE)
    free = _any_shape(free, gpus)
    less = None if find(free) else _rate(free, find)
    if less is not None:
        free = replace(free, rate_per_s=less.offered)
    found = find(free)
    if found is None:
        return ()
    broken = [r for one in _lifted(request) if (r := _relaxation(one, one.offered(found))).factor > 1]
    accuracy, offered = request.slos.accuracy, found.estimate.accuracy
    if accuracy is not None and offered < accuracy:
        broken.append(_less_accurate(accuracy, offered))
    if less is not None:
        broken.append(less)
    if request.headroom > 0:
        broken.append(_less_headroom(request.headroom, 0.0))
    if request.scope is not Scope.NONE:
        broken.append(_shared(request))
    if not _allowed(request, found):
        broken.append(_wider(request, found))
    return tuple(broken)


def relaxed(request: Request, relaxation: Relaxation, gpus: int) -> Request:
    """The request with a relaxation of `relaxations` or `together` taken into it."""
    constraint, offered = relaxation.constraint, relaxation.offered
    if constraint is Constraint.PARALLELISM:
        return _any_shape(request, gpus)
    if constraint in _LIMITS:
        limit = offered if constraint is Constraint.ACCURACY else rounded(offered * SLACK, up=True)
        return replace(request, slos=replace(request.slos, **{constraint.value: limit}))
    changes: dict[Constraint, dict[str, Any]] = {
        Constraint.RATE: {"rate_per_s": offered},
        Constraint.HEADROOM: {"headroom": offered},
        Constraint.ANTI_AFFINITY: {"scope": Scope.NONE},
        Constraint.MEMORY: {"concurrency": int(offered)},
    }
    return replace(request, **changes[constraint])


# --- limits that are lifted as a whole ----------------------------------------------------------------


@dataclass(frozen=True)
class _Lifted:
    """A request without one limit, and the value of it that a placement offers instead."""

    constraint: Constraint
    asked: float
    request: Request
    offered: Callable[[Placement], float]
    unit: str


def _lifted(request: Request) -> Iterator[_Lifted]:
    slos = request.slos
    for constraint, offered, unit, intent in (
        (Constraint.LATENCY, lambda p: p.choice.latency_s, "s", Intent.MIN_LATENCY),
        (Constraint.TTFT, lambda p: p.estimate.ttft_s, "s", Intent.MIN_LATENCY),
        (Constraint.TPOT, lambda p: p.estimate.tpot_s, "s", Intent.MIN_LATENCY),
        (Constraint.COST, lambda p: _cost(request, p), UNITS[request.cost], Intent.MIN_COST),
    ):
        asked = getattr(slos, constraint.value)
        if asked is not None:
            without = replace(request, intent=intent, slos=replace(slos, **{constraint.value: None}))
            yield _Lifted(constraint, asked, without, offered, unit)


def _relaxation(lifted: _Lifted, offered: float) -> Relaxation:
    factor = max(1.0, offered / lifted.asked)
    text = (
        f"raise {lifted.constraint} from {lifted.asked:.4g} to {rounded(offered, up=True):.10g} {lifted.unit}"
    )
    return Relaxation(lifted.constraint, lifted.asked, offered, factor, text + _times(factor))


def _cost(request: Request, found: Placement) -> float:
    memory_bytes = sum(found.estimate.memory_bytes)
    return cost(request.cost, found.plan.world_size, memory_bytes, found.choice.latency_s)


def _times(factor: float) -> str:
    return f" ({factor:.3g} times)" if factor > 1 else ""


# --- constraints of which some is kept ----------------------------------------------------------------


def _accuracy(request: Request, find: Find) -> Relaxation | None:
    """The most accurate compression below the limit that can be placed."""
    asked = request.slos.accuracy
    if asked is None:
        return None
    below = sorted({c.accuracy for c in request.model.compressions if c.accuracy < asked}, reverse=True)
    for accuracy in below:
        if find(replace(request, slos=replace(request.slos, accuracy=accuracy))) is not None:
            return _less_accurate(asked, accuracy)
    return None


def _less_accurate(asked: float, offered: float) -> Relaxation:
    text = f"accept an accuracy of {offered:.4g} instead of {asked:.4g}"
    return Relaxation(Constraint.ACCURACY, asked, offered, asked / max(offered, asked * LEAST), text)


def _rate(request: Request, find: Find) -> Relaxation | None:
    """A rate that one copy keeps up with, to within 1/64 of what is in question."""
    idle = find(replace(request, rate_per_s=0.0)) if request.rate_per_s > 0 else None
    if idle is None:
        return None
    low, high = 0.0, request.rate_per_s
    most = idle.choice.throughput_per_s / SLACK
    if most < high and find(replace(request, rate_per_s=most)) is not None:
        low = most
    elif most < high:
        high = most
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if find(replace(request, rate_per_s=middle)) is None:
            high = middle
        else:
            low = middle
    return _less_often(request.rate_per_s, low)


def _less_often(asked: float, offered: float) -> Relaxation:
    shown = f"{rounded(offered, up=False):.4g} of {asked:.4g} requests/s"
    text = f"one copy keeps up with {shown}: place more copies, or expect less"
    return Relaxation(Constraint.RATE, asked, offered, asked / max(offered, asked * LEAST), text)


def _headroom(request: Request, find: Find) -> Relaxation | None:
    """As much as can be kept, to within 1/64 of what was asked."""
    if request.headroom <= 0 or find(replace(request, headroom=0.0)) is None:
        return None
    low, high = 0.0, request.headroom
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if find(replace(request, headroom=middle)) is None:
            high = middle
        else:
            low = middle
    return _less_headroom(request.headroom, low)


def _less_headroom(asked: float, offered: float) -> Relaxation:
    text = f"leave {offered:.1%} of each GPU free instead of {asked:.1%}"
    return Relaxation(Constraint.HEADROOM, asked, offered, (1 - offered) / (1 - asked), text)


def _scope(request: Request, find: Find) -> Relaxation | None:
    if request.scope is Scope.NONE or find(replace(request, scope=Scope.NONE)) is None:
        return None
    return _shared(request)


def _shared(request: Request) -> Relaxation:
    text = f"let deployments of group {request.group} share a {request.scope}"
    return Relaxation(Constraint.ANTI_AFFINITY, 1.0, 0.0, 1.0, text)


def _memory(request: Request, find: Find) -> Relaxation | None:
    """The most sequences that a KV cache for which there is room holds at once."""
    if request.concurrency <= 1 or find(replace(request, concurrency=1)) is None:
        return None
    low, high = 1, request.concurrency
    while high - low > 1:
        middle = (low + high) // 2
        if find(replace(request, concurrency=middle)) is None:
            high = middle
        else:
            low = middle
    text = f"hold {low} sequences at a time instead of {request.concurrency}"
    return Relaxation(Constraint.MEMORY, request.concurrency, low, request.concurrency / low, text)


def _any_shape(request: Request, gpus: int) -> Request:
    widest = min(gpus, WIDEST)
    return replace(
        request,
        max_tp=max(request.max_tp, widest),
        max_pp=max(request.max_pp, widest),
        only_tp=(),
        only_pp=(),
        layers=(),
    )


def _parallelism(request: Request, find: Find, gpus: int) -> Relaxation | None:
    bounded = request.max_tp < gpus or request.max_pp < gpus
    if not (bounded or request.only_tp or request.only_pp or request.layers):
        return None
    found = find(_any_shape(request, gpus))
    return None if found is None else _wider(request, found)


def _allowed(request: Request, found: Placement) -> bool:
    plan = found.plan
    tp, pp = plan.tensor_parallel, plan.pipeline_parallel
    within = tp <= request.max_tp and pp <= request.max_pp
    named = tp in (request.only_tp or (tp,)) and pp in (request.only_pp or (pp,))
    return within and named and plan.layers_per_stage == (request.layers or plan.layers_per_stage)


def _wider(request: Request, found: Placement) -> Relaxation:
    plan = found.plan
    most = max(request.only_tp or (request.max_tp,)) * max(request.only_pp or (request.max_pp,))
    stages = "+".join(map(str, plan.layers_per_stage))
    text = f"allow TP={plan.tensor_parallel} x PP={plan.pipeline_parallel} (layers {stages})"
    factor = max(1.0, plan.world_size / most)
    return Relaxation(Constraint.PARALLELISM, most, plan.world_size, factor, text)
