"""Our policy: plans, GPUs and splits are weighed together; the layout that leaves most memory wins.

Shapes are tried in order of their best possible objective, until none can beat the best layout so far. For
each shape, groups of GPUs are combined into pipelines, first by a bound and then exactly (`split`). Among all
layouts within `tolerance` of the best objective, the one that fragments the cluster least wins. With
phi(free) = free^2 / total per GPU, an empty GPU is worth more than two half-empty ones. A layout's cost for
the next model is the phi that it takes away.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from placement.solver import bounds as bounding
from placement.solver import groups as grouping
from placement.solver import hosts, orders
from placement.solver.bounds import Terms
from placement.solver.cluster import Link
from placement.solver.concessions import WIDEST
from placement.solver.costs import Costs, costs_of
from placement.solver.families import Family
from placement.solver.groups import Groups
from placement.solver.layout import Layout, Search, needs, placed, plan_of
from placement.solver.memory import stage_bytes
from placement.solver.objective import (
    LowerBounds,
    excesses,
    is_limited,
    limits_of,
    max_latency_s,
    min_objective,
    objective,
    out_of_reach,
)
from placement.solver.places import Places, Shared
from placement.solver.plan import Estimator, Shape
from placement.solver.policies.base import Policy
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.solver.split import Pipeline, Split, best_split, even_split, given_split
from placement.solver.view import Ints, View
from placement.types import Placement
from profiler.plans import even_stages

FEW_SETS = 4000  # of groups: up to this number all sets are searched
SHORT = 8  # stages; for longer pipelines more groups are compared
MAX_SPLITS = 48  # sets of one shape that are split exactly
MAX_KEPT = 12  # single groups of one shape that are considered
LONG = 8  # stages; pipelines with more stages are long
ORDER_TOLERANCE = 0.001  # relative; smaller improvements by another order are ignored
MAX_LONG = 8  # long shapes are not tried after this number of them can be placed


class _Ordered(NamedTuple):
    """An order of groups with its best split. The least is the fastest."""

    latency_s: float
    order: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Joint(Policy):
    """`tolerance`: how much worse an objective may be, relatively, to leave more room for the next model.

    Without `uneven` every stage has as many layers as in the engine's default split.
    """

    tolerance: float = 0.004
    uneven: bool = True

    @property
    def name(self) -> str:
        return "ostinato" if self.uneven else "ostinato-even"

    def search(self, shared: Shared, request: Request) -> Placement | None:
        view, estimator = shared.view(request), shared.estimator(request)
        if view.shared:
            return hosts.find(request, view, estimator)
        search = self._search(shared, request)
        best = search.best()
        if best is None:
            return None
        reason = f"fragmentation cost {best.loss / 2**30:.2f} GiB, the least within {self.tolerance:.1%}"
        tried = Search(search.shapes, len(search.candidates), (reason,))
        return placed(request, view, best.layout, estimator, tried)

    def fits(self, shared: Shared, request: Request) -> bool:
        """Whether `search` finds a placement: it stops at the first layout within every limit."""
        if shared.view(request).shared:
            return self.search(shared, request) is not None
        return self._search(shared, request).finds()

    def _search(self, shared: Shared, request: Request) -> _Search:
        places, estimator = shared.places(request), shared.estimator(request)
        return _Search(request, places, estimator, self.tolerance, self.uneven)


@dataclass(frozen=True)
class _Candidate:
    objective: float
    loss: float
    layout: Layout

    @property
    def key(self) -> tuple[float, float, int, tuple[tuple[int, ...], ...], tuple[int, ...]]:
        shape = self.layout.shape
        return (self.loss, self.objective, shape.ranks, self.layout.groups, self.layout.layers)


@dataclass
class _Search:
    """One decision; its state is never shared."""

    request: Request
    places: Places
    estimator: Estimator
    tolerance: float
    uneven: bool
    shapes: int = 0
    candidates: list[_Candidate] = field(default_factory=list)

    @property
    def view(self) -> View:
        return self.places.view

    def finds(self) -> bool:
        """Whether there is a candidate."""
        layouts = (layout for _, shape in self._bounds() for layout in self._layouts(shape))
        return any(self._consider(layout) for layout in layouts)

    def best(self) -> _Candidate | None:
        best, long = float("inf"), 0
        for bound, shape in self._bounds():
            if bound > best * (1 + self.tolerance):
                break
            if shape.pp > LONG and long == MAX_LONG:
                continue
            before = len(self.candidates)
            for layout in self._layouts(shape):
                self._consider(layout)
            long += shape.pp > LONG and len(self.candidates) > before
            best = min((f.objective for f in self.candidates), default=best)
        near = [f for f in self.candidates if f.objective <= best * (1 + self.tolerance)]
        return min(near, key=lambda f: f.key, default=None)

    def _bounds(self) -> list[tuple[float, Shape]]:
        """Shapes by the least objective that a layout could have; shapes without a layout are left out."""
        bounds = {shape: self._bound(shape) for shape in self._shapes()}
        possible = (shape for shape, bound in bounds.items() if bound < float("inf"))
        return [(bounds[shape], shape) for shape in sorted(possible, key=lambda shape: bounds[shape])]

    def _shapes(self) -> list[Shape]:
        min_accuracy = self.request.slos.accuracy or 0.0
        allowed = [s for s in shapes(self.request, len(self.view)) if s.compression.accuracy >= min_accuracy]
        self.shapes = len(allowed)
        return allowed

    def _bound(self, shape: Shape) -> float:
        """The least objective of any layout of this shape: all layers at the fastest rate. Infinite: no
        layout is within the limits, or none holds all layers."""
        if not self.places.holds(shape, self.request.model.layers, self.estimator):
            return float("inf")
        groups = self.places.best_groups(shape.tp)
        costs = costs_of(self.request, shape, self.view, groups, self.estimator)
        layers, tokens = self.request.model.layers, self.request.output_tokens - 1
        if costs.most(shape.pp) < layers:
            return float("inf")
        hop_s = self.estimator.hop_s(shape, Link.FAST)
        prompt = layers * costs.prefill.min() + costs.prefill_rest.min() + (shape.pp - 1) * hop_s.prompt
        prompt += self.estimator.path_s
        token = layers * costs.decode.min() + costs.decode_rest.min() + (shape.pp - 1) * hop_s.token
        bounds = LowerBounds(float(prompt), float(token), float(prompt + tokens * token))
        if out_of_reach(self.request, shape, self.estimator, bounds):
            return float("inf")
        return min_objective(self.request, shape, self.estimator, bounds.latency_s)

    def _consider(self, layout: Layout) -> bool:
        """Add the layout as a candidate; False if it breaks a limit."""
        figures = self.estimator(plan_of(self.view, layout))
        if excesses(self.request, layout.shape, figures):
            return False
        value = objective(self.request, layout.shape, figures)
        self.candidates.append(_Candidate(value, self._loss(layout), layout))
        return True

    def _loss(self, layout: Layout) -> float:
        return sum(
            need * (2 * int(self.view.free[gpu]) - need) / int(self.view.total[gpu])
            for gpu, need in needs(self.estimator, layout).items()
        )

    def _layouts(self, shape: Shape) -> Iterator[Layout]:
        if shape.pp == 1:
            yield from self._whole(shape)
            return
        groups, layers = self.places.groups(shape.tp), self.request.model.layers
        every = grouping.every_set(groups, shape.pp, FEW_SETS)
        if every is not None:
            costs = costs_of(self.request, shape, self.view, groups, self.estimator)
            yield from self._pipelines(shape, groups, costs, every)
            return
        for family in self.places.families(shape.tp):
            if not self._reaches(shape, family):
                continue
            groups = family.groups
            costs = costs_of(self.request, shape, self.view, groups, self.estimator)
            sets = family.sets(shape.pp, costs.decode, partial(orders.may_hold, costs, layers))
            yield from self._pipelines(shape, groups, costs, sets)

    def _reaches(self, shape: Shape, family: Family) -> bool:
        """Whether a pipeline of these groups may hold all layers within the limits; False: none does."""
        band = family.band(SHORT if shape.pp <= SHORT else WIDEST)
        costs = costs_of(self.request, shape, self.view, band, self.estimator)
        terms = bounding.terms_of(self.request, shape, self.estimator)
        if not bounding.may_hold(costs, terms):
            return False
        if not is_limited(self.request):
            return True
        bounds, path_s = bounding.of_any(costs, terms), self.estimator.path_s
        bounds = LowerBounds(bounds.ttft_s + path_s, bounds.tpot_s, bounds.latency_s + path_s)
        return not out_of_reach(self.request, shape, self.estimator, bounds)

    def _whole(self, shape: Shape) -> Iterator[Layout]:
        """One stage: the fastest groups, and among nearly equal ones those that fragment least."""
        groups, layers = self.places.groups(shape.tp), self.request.model.layers
        costs = costs_of(self.request, shape, self.view, groups, self.estimator)
        prompt = layers * costs.prefill + costs.prefill_rest
        max_prompt_s = limits_of(self.request, self.estimator).prompt_s
        able = np.flatnonzero((costs.first >= layers) & (prompt <= max_prompt_s))
        if not len(able):
            return
        token = layers * costs.decode + costs.decode_rest
        latency = (prompt + (self.request.output_tokens - 1) * token)[able]
        (need,) = stage_bytes(self.estimator, shape, (layers,))
        loss = (2.0 * need * groups.fill - float(need) ** 2 * groups.grain)[able]
        near = latency <= latency.min() * (1 + self.tolerance)
        order = np.lexsort((latency, loss, ~near))[:MAX_KEPT]
        for column in {int(able[np.argmin(latency)]): None, **dict.fromkeys(able[order].tolist())}:
            yield Layout(shape, (tuple(groups.members[column].tolist()),), (layers,))

    def _pipelines(self, shape: Shape, groups: Groups, costs: Costs, sets: Ints) -> Iterator[Layout]:
        sets = sets[orders.holds(costs, sets, self.request.model.layers, self._fixed(shape))]
        terms = bounding.terms_of(self.request, shape, self.estimator)
        bounds = bounding.of_sets(costs, sets, terms)
        order = np.argsort(bounds, kind="stable")[:MAX_SPLITS]
        best, most = float("inf"), max_latency_s(self.request, shape, self.estimator)
        for row in order.tolist():
            if bounds[row] > min(best * (1 + self.tolerance), most) or bounds[row] == float("inf"):
                return
            split = self._split(terms, groups, costs, sets[row].tolist())
            if split is not None:
                latency_s, layout = split
                best = min(best, latency_s)
                yield layout

    def _split(
        self, terms: Terms, groups: Groups, costs: Costs, columns: list[int]
    ) -> tuple[float, Layout] | None:
        """The best order of these groups, with its best split."""
        best: _Ordered | None = None
        for bound, order in self._orders(terms, groups, costs, columns):
            if best is not None and bound > best.latency_s * (1 - ORDER_TOLERANCE):
                break
            split = self._layers(_pipeline(terms, groups, costs, order))
            if split is None:
                continue
            found = _Ordered(split.latency_s, order, split.layers)
            best = found if best is None else min(best, found)
        if best is None:
            return None
        members = tuple(tuple(groups.members[k].tolist()) for k in best.order)
        return best.latency_s, Layout(terms.shape, members, best.layers)

    def _orders(
        self, terms: Terms, groups: Groups, costs: Costs, columns: list[int]
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Each order that may be the best, with a lower bound of the seconds of its splits; the bounds
        ascend."""
        if self._fixed(terms.shape) and terms.shape.pp <= orders.MAX_PERMUTED:
            yield from ((0.0, order) for order in itertools.permutations(columns))
            return
        chosen = np.array(columns)
        bounds = bounding.of_ends(costs, groups, chosen, terms)
        pairs = orders.ends(len(columns))
        for pair in np.argsort(bounds, kind="stable").tolist():
            if bounds[pair] < np.inf:
                first, last = chosen[pairs[pair]].tolist()
                yield float(bounds[pair]), orders.path(groups, columns, first, last)

    def _fixed(self, shape: Shape) -> tuple[int, ...]:
        """The layers of each stage, if they are fixed."""
        if self.request.layers or self.uneven:
            return self.request.layers
        return even_stages(self.request.model.layers, shape.pp)

    def _layers(self, pipeline: Pipeline) -> Split | None:
        if self.request.layers:
            return given_split(pipeline, self.request.layers)
        return (best_split if self.uneven else even_split)(pipeline, self.request.model.layers)


def _pipeline(terms: Terms, groups: Groups, costs: Costs, order: tuple[int, ...]) -> Pipeline:
    hops = [terms.hops[_link(groups, a, b)] for a, b in itertools.pairwise(order)]
    columns = list(order)
    return Pipeline(
        caps=np.array([costs.caps(stage, terms.shape.pp)[k] for stage, k in enumerate(order)]),
        prefill=costs.prefill[columns],
        decode=costs.decode[columns],
        prefill_rest_s=float(costs.prefill_rest[order[-1]]),
        decode_rest_s=float(costs.decode_rest[order[-1]]),
        decode_gaps=np.array([*costs.decode_gap[columns[:-1]], 0.0]),
        hop_prefill_s=sum(hop for hop, _ in hops),
        hop_decode_s=sum(hop for _, hop in hops),
        groups=terms.batches,
        tokens=terms.tokens,
        turns_s=terms.turns_s,
        max_prompt_s=terms.limits.prompt_s,
        max_token_s=terms.limits.token_s,
    )


def _link(groups: Groups, one: int, other: int) -> Link:
    if groups.node[one] != groups.node[other]:
        return Link.NETWORK
    same = groups.nvlink_domain[one] == groups.nvlink_domain[other] and groups.nvlink_domain[one] >= 0
    return Link.FAST if same else Link.NODE
