"""Which constraints are in the way of a request, and by how much each would have to give. Pure.

Each is lifted alone; what is found without it says how far the request is from being met. Where none alone
is in the way all limits are lifted at once. Of both no more than `SEARCHES` searches are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from placement.solver import concessions
from placement.solver.concessions import SLACK, Find
from placement.solver.numbers import rounded
from placement.solver.objective import UNITS, cost
from placement.solver.request import Request
from placement.types import Constraint, Intent, Placement, Relaxation, Slos

SEARCHES = 24
_LIMITS = {Constraint.LATENCY, Constraint.TTFT, Constraint.TPOT, Constraint.COST, Constraint.ACCURACY}


def relaxations(request: Request, find: Find, gpus: int) -> tuple[Relaxation, ...]:
    """Of each constraint that is set, lifted alone: what would do on `gpus` GPUs; the nearest first.

    Giving up an anti-affinity is no matter of degree, and comes last.
    """
    find = _at_most(SEARCHES, find)
    found = [*_singles(request, find)]
    others = any(one.constraint is not Constraint.ANTI_AFFINITY for one in found)
    if not others or concessions.names_shapes(request):  # wider than usual is the last resort
        wider = concessions.parallelism(request, find, gpus)
        found += [wider] if wider is not None else []
    return tuple(sorted(found, key=lambda r: (r.constraint is Constraint.ANTI_AFFINITY, r.factor)))


def _at_most(searches: int, find: Find) -> Find:
    """The search, which finds nothing any more when it was made so often: what is offered then gives way by
    more than it had to, and still suffices."""
    numbers = itertools.count(1)
    return lambda request: find(request) if next(numbers) <= searches else None


def _singles(request: Request, find: Find) -> Iterator[Relaxation]:
    for lifted in _lifted(request):
        found = find(lifted.request)
        if found is not None:
            yield _relaxation(lifted, lifted.offered(found))
    for search in (
        concessions.accuracy,
        concessions.rate,
        concessions.headroom,
        concessions.scope,
        concessions.memory,
    ):
        one = search(request, find)
        if one is not None:
            yield one


def together(request: Request, find: Find, gpus: int) -> tuple[Relaxation, ...]:
    """Every limit lifted at once: by how much the fastest placement then breaks each. () if there is none.

    An anti-affinity is kept if it can be, the allowed shapes too, and of the rate as much as can.
    """
    find = _at_most(SEARCHES, find)
    wider = concessions.any_shape(request, gpus)
    return _broken(request, request, find) or _broken(request, wider, find)


def _broken(request: Request, shaped: Request, find: Find) -> tuple[Relaxation, ...]:
    """What of the request the fastest placement in the shapes of `shaped` breaks."""
    free = replace(shaped, intent=Intent.MIN_LATENCY, slos=Slos(), headroom=0.0)
    scope = _scope(free, find)
    if scope is not None:
        free = concessions.ungrouped(free)
    less = None if find(free) else concessions.rate(free, find)
    if less is not None:
        free = replace(free, rate_per_s=less.offered)
    found = find(free)
    if found is None:
        return ()
    broken = [r for one in _lifted(request) if (r := _relaxation(one, one.offered(found))).factor > 1]
    accuracy, offered = request.slos.accuracy, found.estimate.accuracy
    if accuracy is not None and offered < accuracy:
        broken.append(concessions.less_accurate(accuracy, offered))
    if less is not None:
        broken.append(less)
    if request.headroom > 0:
        broken.append(concessions.less_headroom(request.headroom, 0.0))
    if scope is not None:
        broken.append(scope)
    if not concessions.allowed(request, found):
        broken.append(concessions.wider(request, found))
    return tuple(broken)


def _scope(free: Request, find: Find) -> Relaxation | None:
    """The anti-affinity, if nothing fits beside it at any rate."""
    idle = replace(free, rate_per_s=0.0)
    return concessions.scope(idle, find) if find(idle) is None else None


def relaxed(request: Request, relaxation: Relaxation, gpus: int) -> Request:
    """The request with a relaxation of `relaxations` or `together` taken into it."""
    constraint, offered = relaxation.constraint, relaxation.offered
    if constraint is Constraint.PARALLELISM:
        return concessions.any_shape(request, gpus)
    if constraint is Constraint.ANTI_AFFINITY:
        return concessions.ungrouped(request)
    if constraint in _LIMITS:
        limit = offered if constraint is Constraint.ACCURACY else rounded(offered * SLACK, up=True)
        return replace(request, slos=replace(request.slos, **{constraint.value: limit}))
    changes: dict[Constraint, dict[str, Any]] = {
        Constraint.RATE: {"rate_per_s": offered},
        Constraint.HEADROOM: {"headroom": offered},
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
