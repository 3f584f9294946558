"""The constraints that prevent a request's placement, and how much each would have to be relaxed. Pure.

Each constraint is lifted alone: the placement without it shows how far the request is from being met. If no
single constraint is the cause, all limits are lifted at once. Each of both makes at most `SEARCHES` searches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from placement.solver import concessions
from placement.solver.concessions import SLACK, Find, Fits
from placement.solver.numbers import rounded
from placement.solver.objective import UNITS, cost
from placement.solver.request import Request
from placement.types import Constraint, Intent, Placement, Relaxation, Slos
from profiler.figures import figure

SEARCHES = 24
_LIMITS = {Constraint.LATENCY, Constraint.TTFT, Constraint.TPOT, Constraint.COST, Constraint.ACCURACY}


def relaxations(request: Request, find: Find, gpus: int, fits: Fits | None = None) -> tuple[Relaxation, ...]:
    """For each constraint that is set, lifted alone: what would suffice on `gpus` GPUs; the nearest first.

    Giving up an anti-affinity has no degree, and comes last. `fits` answers faster than `find` whether there
    is a placement.
    """
    find, fits = _at_most(SEARCHES, find, fits)
    options = [*_singles(request, find, fits)]
    others = any(relaxation.constraint is not Constraint.ANTI_AFFINITY for relaxation in options)
    if not others or concessions.names_shapes(request):  # more parallelism than usual is the last resort
        wider = concessions.parallelism(request, find, gpus)
        options += [wider] if wider is not None else []
    return nearest_first(options)


def nearest_first(options: Iterable[Relaxation]) -> tuple[Relaxation, ...]:
    return tuple(sorted(options, key=lambda r: (r.constraint is Constraint.ANTI_AFFINITY, r.factor)))


def _at_most(searches: int, find: Find, fits: Fits | None) -> tuple[Find, Fits]:
    """A search that finds nothing after `searches` calls. A relaxation is then larger than necessary, but it
    still suffices."""
    numbers = itertools.count(1)
    finds = fits or (lambda request: find(request) is not None)
    return (
        lambda request: find(request) if next(numbers) <= searches else None,
        lambda request: next(numbers) <= searches and finds(request),
    )


def _singles(request: Request, find: Find, fits: Fits) -> Iterator[Relaxation]:
    for lifted in _lifted(request):
        placement = find(lifted.request)
        if placement is not None:
            yield _relaxation(lifted, lifted.offered(placement))
    for search in (
        concessions.accuracy,
        partial(concessions.rate, find=find),
        concessions.headroom,
        concessions.scope,
        concessions.memory,
    ):
        relaxation = search(request, fits=fits)
        if relaxation is not None:
            yield relaxation


def together(request: Request, find: Find, gpus: int, fits: Fits | None = None) -> tuple[Relaxation, ...]:
    """Lift every limit at once: how far the fastest placement then breaks each limit; () if there is none.

    If possible, the anti-affinity and the allowed shapes are kept, and as much of the rate as possible.
    """
    find, fits = _at_most(SEARCHES, find, fits)
    wider = concessions.any_shape(request, gpus)
    return _broken(request, request, find, fits) or _broken(request, wider, find, fits)


def _broken(request: Request, shaped: Request, find: Find, fits: Fits) -> tuple[Relaxation, ...]:
    """The limits of the request that the fastest placement in the shapes of `shaped` breaks."""
    free = replace(shaped, intent=Intent.MIN_LATENCY, slos=Slos(), headroom=0.0)
    scope = _scope(free, fits)
    if scope is not None:
        free = concessions.ungrouped(free)
    less = None if fits(free) else concessions.rate(free, find, fits)
    if less is not None:
        free = replace(free, rate_per_s=less.offered)
    placement = find(free)
    if placement is None:
        return ()
    broken = [
        r for lifted in _lifted(request) if (r := _relaxation(lifted, lifted.offered(placement))).factor > 1
    ]
    accuracy, offered = request.slos.accuracy, placement.estimate.accuracy
    if accuracy is not None and offered < accuracy:
        broken.append(concessions.less_accurate(accuracy, offered))
    if less is not None:
        broken.append(less)
    if request.headroom > 0:
        broken.append(concessions.less_headroom(request.headroom, 0.0))
    if scope is not None:
        broken.append(scope)
    if not concessions.allowed(request, placement):
        broken.append(concessions.wider(request, placement))
    return tuple(broken)


def _scope(free: Request, fits: Fits) -> Relaxation | None:
    """The relaxation of the anti-affinity, if nothing fits with it at any rate."""
    idle = replace(free, rate_per_s=0.0)
    return None if fits(idle) else concessions.scope(idle, fits)


def relaxed(request: Request, relaxation: Relaxation, gpus: int) -> Request:
    """The request with a relaxation from `relaxations` or `together` applied."""
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
    """A request without one limit, and the function that reads a placement's value of it."""

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
    raised = f"from {figure(lifted.asked, 4)} to {rounded(offered, up=True):.10g} {lifted.unit}"
    text = f"raise {lifted.constraint} {raised}"
    return Relaxation(lifted.constraint, lifted.asked, offered, factor, text + _times(factor))


def _cost(request: Request, placement: Placement) -> float:
    memory_bytes = sum(placement.estimate.memory_bytes)
    return cost(request.cost, placement.plan.world_size, memory_bytes, placement.choice.latency_s)


def _times(factor: float) -> str:
    return f" ({figure(factor)} times)" if factor > 1 else ""
