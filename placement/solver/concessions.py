"""Constraints that can be kept in part: a search finds which part. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from placement.solver.numbers import rounded
from placement.solver.request import Request
from placement.types import Constraint, Placement, Relaxation, Scope
from profiler.figures import figure

HALVINGS = 6  # of the interval between a value that works and a value that does not
WIDEST = 64
MIN_SHARE = 1e-9  # of the requested value: it keeps a factor finite
SLACK = 1 + 1e-9  # so that rounding does not make a sufficient value insufficient

Find = Callable[[Request], Placement | None]
Fits = Callable[[Request], bool]  # whether a search would find a placement


def accuracy(request: Request, fits: Fits) -> Relaxation | None:
    """The most accurate compression below the limit that can be placed."""
    asked = request.slos.accuracy
    if asked is None:
        return None
    below = sorted({c.accuracy for c in request.model.compressions if c.accuracy < asked}, reverse=True)
    for offered in below:
        if fits(replace(request, slos=replace(request.slos, accuracy=offered))):
            return less_accurate(asked, offered)
    return None


def less_accurate(asked: float, offered: float) -> Relaxation:
    text = f"accept an accuracy of {figure(offered, 4)} instead of {figure(asked, 4)}"
    return Relaxation(Constraint.ACCURACY, asked, offered, asked / max(offered, asked * MIN_SHARE), text)


def rate(request: Request, find: Find, fits: Fits) -> Relaxation | None:
    """A rate that one copy can sustain, to within 1/64 of the searched interval."""
    idle = find(replace(request, rate_per_s=0.0)) if request.rate_per_s > 0 else None
    if idle is None:
        return None
    low, high = 0.0, request.rate_per_s
    most = idle.choice.throughput_per_s / SLACK
    if most < high and fits(replace(request, rate_per_s=most)):
        low = most
    elif most < high:
        high = most
    sustained = _largest(low, high, lambda rate: fits(replace(request, rate_per_s=rate)))
    return _less_often(request.rate_per_s, sustained)


def _less_often(asked: float, offered: float) -> Relaxation:
    shown = f"{figure(rounded(offered, up=False), 4)} of {figure(asked, 4)} requests/s"
    text = f"one copy can serve {shown}: place more copies, or expect a lower rate"
    return Relaxation(Constraint.RATE, asked, offered, asked / max(offered, asked * MIN_SHARE), text)


def headroom(request: Request, fits: Fits) -> Relaxation | None:
    """The largest headroom that can be kept, to within 1/64 of the requested headroom."""
    if request.headroom <= 0 or not fits(replace(request, headroom=0.0)):
        return None
    largest = _largest(0.0, request.headroom, lambda kept: fits(replace(request, headroom=kept)))
    return less_headroom(request.headroom, largest)


def _largest(low: float, high: float, works: Callable[[float], bool]) -> float:
    """A value that works, found by halving, near one that does not. `low` works and `high` does not."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if works(middle):
            low = middle
        else:
            high = middle
    return low


def less_headroom(asked: float, offered: float) -> Relaxation:
    text = f"leave {offered:.1%} of each GPU's memory free instead of {asked:.1%}"
    return Relaxation(Constraint.HEADROOM, asked, offered, (1 - offered) / (1 - asked), text)


def scope(request: Request, fits: Fits) -> Relaxation | None:
    """Give up anti-affinity; it cannot be kept in part."""
    if not request.group or not fits(ungrouped(request)):
        return None
    text = f"take the deployment out of anti-affinity group {request.group}"
    return Relaxation(Constraint.ANTI_AFFINITY, 1.0, 0.0, 1.0, text)


def ungrouped(request: Request) -> Request:
    """The request outside of its group: the anti-affinity of both sides is ignored."""
    return replace(request, group="", scope=Scope.NONE)


def memory(request: Request, fits: Fits) -> Relaxation | None:
    """The most sequences whose KV cache fits."""
    if request.concurrency <= 1 or not fits(replace(request, concurrency=1)):
        return None
    low, high = 1, request.concurrency
    while high - low > 1:
        middle = (low + high) // 2
        if fits(replace(request, concurrency=middle)):
            low = middle
        else:
            high = middle
    text = f"run {low} requests at once instead of {request.concurrency}"
    return Relaxation(Constraint.MEMORY, request.concurrency, low, request.concurrency / low, text)


def any_shape(request: Request, gpus: int) -> Request:
    widest = min(gpus, WIDEST)
    return replace(
        request,
        max_tp=max(request.max_tp, widest),
        max_pp=max(request.max_pp, widest),
        only_tp=(),
        only_pp=(),
        layers=(),
    )


def names_shapes(request: Request) -> bool:
    """Whether the request bounds the plan's parallelism, in addition to the bounds of every request."""
    fewer = request.max_tp < Request.max_tp or request.max_pp < Request.max_pp
    return bool(fewer or request.only_tp or request.only_pp or request.layers)


def parallelism(request: Request, find: Find, gpus: int) -> Relaxation | None:
    bounded = request.max_tp < gpus or request.max_pp < gpus
    if not (bounded or names_shapes(request)):
        return None
    placement = find(any_shape(request, gpus))
    return None if placement is None else wider(request, placement)


def allowed(request: Request, placement: Placement) -> bool:
    plan = placement.plan
    tp, pp = plan.tensor_parallel, plan.pipeline_parallel
    within = tp <= request.max_tp and pp <= request.max_pp
    named = tp in (request.only_tp or (tp,)) and pp in (request.only_pp or (pp,))
    return within and named and plan.layers_per_stage == (request.layers or plan.layers_per_stage)


def wider(request: Request, placement: Placement) -> Relaxation:
    plan = placement.plan
    most = max(request.only_tp or (request.max_tp,)) * max(request.only_pp or (request.max_pp,))
    stages = "+".join(map(str, plan.layers_per_stage))
    text = f"allow TP={plan.tensor_parallel} x PP={plan.pipeline_parallel} (layers {stages})"
    factor = max(1.0, plan.world_size / most)
    return Relaxation(Constraint.PARALLELISM, most, plan.world_size, factor, text)
