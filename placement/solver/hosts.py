"""Placing on CPU hosts: one host carries all ranks, which share its cores and memory.

There, several ranks are not faster than one rank and need more memory, so a model is split only if the
request says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from placement.solver.layout import Layout, Search, fits, placed, plan_of
from placement.solver.objective import excesses, objective
from placement.solver.plan import Estimator, Shape
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.solver.view import View
from placement.types import Placement
from profiler.plans import even_stages


def find(request: Request, view: View, estimator: Estimator) -> Placement | None:
    """The best placement within every limit; among equals the fewest ranks, then the host with most free."""
    candidates = []
    for layout in layouts(request, view):
        figures = estimator(plan_of(view, layout))
        if fits(view, estimator, layout) and not excesses(request, layout.shape, figures):
            host = layout.groups[0][0]
            value = objective(request, layout.shape, figures)
            candidates.append(((value, layout.shape.ranks, -int(view.usable[host]), host), layout))
    if not candidates:
        return None
    _, best = min(candidates, key=lambda candidate: candidate[0])
    tried = len(_shapes(request))
    return placed(request, view, best, estimator, Search(tried, len(candidates)))


def layouts(request: Request, view: View) -> Iterator[Layout]:
    """Layouts on each host. Stages are even unless the request says otherwise, because they share memory."""
    for shape in _shapes(request):
        split = request.layers or even_stages(request.model.layers, shape.pp)
        for host in range(len(view)):
            yield Layout(shape, ((host,) * shape.tp,) * shape.pp, split)


def _shapes(request: Request) -> tuple[Shape, ...]:
    fewest = replace(
        request, only_tp=request.only_tp or (1,), only_pp=request.only_pp or (len(request.layers) or 1,)
    )
    return shapes(fewest, max_ranks(request))


def max_ranks(request: Request) -> int:
    return request.max_tp * request.max_pp
