"""What the searches of one decision share, computed once.

It includes the places of GPUs, the groups of GPUs, and the candidates' costs under one load.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from placement.solver import groups as grouping
from placement.solver.cluster import Cluster
from placement.solver.default_estimator import EstimatorFor, estimator_of
from placement.solver.families import Family
from placement.solver.groups import Groups
from placement.solver.memory import most_layers
from placement.solver.plan import Estimator, Shape
from placement.solver.request import Request
from placement.solver.view import Ints, View, whole_view, with_headroom

FEW_GROUPS = 80  # small clusters are searched group by group


class Places:
    """The GPUs of a view, and the groups of these GPUs."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._every: dict[int, Groups] = {}
        self._best: dict[int, Groups] = {}
        self._families: dict[int, tuple[Family, ...]] = {}
        self._rooms: dict[int, Ints] = {}

    def groups(self, tp: int) -> Groups:
        """All groups of `tp` GPUs if they are few, else groups of neighbours."""
        if tp not in self._every:
            every = grouping.every_group(self.view, tp, FEW_GROUPS)
            if every is not None or tp > 1:
                near = (every,) if every is not None else grouping.neighbours(self.view, tp, disjoint=False)
                self._every[tp] = grouping.distinct(near)
            else:
                (family,) = self.families(tp)
                self._every[tp] = family.groups
        return self._every[tp]

    def best_groups(self, tp: int) -> Groups:
        """Those of `groups` for which no other group is as fast and has as much memory."""
        if tp not in self._best:
            self._best[tp] = Family(self.groups(tp)).band(1)
        return self._best[tp]

    def families(self, tp: int) -> tuple[Family, ...]:
        """Groups of neighbours that share no GPU."""
        if tp not in self._families:
            near = grouping.neighbours(self.view, tp, disjoint=True)
            self._families[tp] = tuple(Family(groups) for groups in near)
        return self._families[tp]

    def holds(self, shape: Shape, layers: int, estimator: Estimator) -> bool:
        """Whether enough memory is free for this shape; False: no layout of it fits."""
        rooms, pp = self._rooms_of(shape.tp), shape.pp
        if len(rooms) < pp:
            return False
        if pp == 1:
            return bool(most_layers(estimator.lines(shape, 0), rooms[:1])[0] >= layers)
        most = layers - pp + 1
        ends = [int(most_layers(estimator.lines(shape, stage), rooms[:1])[0]) for stage in (0, pp - 1)]
        between = most_layers(estimator.lines(shape, 1), rooms[: pp - 2]) if pp > 2 else rooms[:0]
        if min(ends) < 1 or between.min(initial=1) < 1:
            return False
        held = sum(min(most, end) for end in ends) + int(np.minimum(most, between).sum())
        return held >= layers

    def _rooms_of(self, tp: int) -> Ints:
        """Usable memory of each group's fullest GPU, largest first, if the GPUs with most memory of a node
        form groups. No other grouping gives more memory to as many groups."""
        if tp not in self._rooms:
            view, runs = self.view, grouping.runs_of(self.view)
            order = np.lexsort((-view.usable, runs))
            first = np.searchsorted(runs[order], runs[order])
            last_of_group = (np.arange(len(order)) - first) % tp == tp - 1
            self._rooms[tp] = -np.sort(-view.usable[order[last_of_group]])
        return self._rooms[tp]


class Shared:
    """Shared state of searches on one cluster. An estimator belongs to a model and a load, not to limits."""

    def __init__(self, cluster: Cluster, estimator_for: EstimatorFor = estimator_of) -> None:
        self.cluster = cluster
        self._estimator_for = estimator_for
        self._views: dict[Hashable, View] = {}
        self._places: dict[Hashable, Places] = {}
        self._estimators: dict[Hashable, tuple[Request, Estimator]] = {}

    def places(self, request: Request) -> Places:
        seen = (request.group, request.scope)
        key = (seen, request.headroom)
        if key not in self._places:
            if seen not in self._views:
                self._views[seen] = whole_view(self.cluster, request)
            self._places[key] = Places(with_headroom(self._views[seen], request.headroom))
        return self._places[key]

    def view(self, request: Request) -> View:
        return self.places(request).view

    def estimator(self, request: Request) -> Estimator:
        load = (request.rate_per_s, request.input_tokens, request.output_tokens)
        key = (id(request.model), *load, request.concurrency, request.context, request.sequence_tokens)
        if key not in self._estimators:
            # The request is stored as well, so that its model stays alive and no other model gets its id.
            self._estimators[key] = request, self._estimator_for(self.cluster, request)
        _, estimator = self._estimators[key]
        return estimator
