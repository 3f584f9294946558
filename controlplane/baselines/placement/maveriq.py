"""The paper's policies (MaverIQ, section 6): plans ranked first, then GPUs by load, then layers by memory.

Kept from the paper: the rank of plans by the intent alone, with each plan's figures for even stages on idle
GPUs; the three GPU selections; the blocks of equal size and their round robin. Where the paper's code has
errors, this follows the text: ranks are listed by stage, not by size, and a plan that does not fit is not
tried twice. A block's size spreads memory that does not grow with layers (runtime, embedding, head) evenly,
so a mapping by blocks can overflow a small fragment. Then blocks are counted by the ranks' real memory, which
favours the paper over a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from placement.solver import hosts
from placement.solver.cluster import Link
from placement.solver.layout import Layout, Search, fits, placed, plan_of
from placement.solver.memory import most_layers, total_bytes
from placement.solver.objective import excesses, objective
from placement.solver.places import Shared
from placement.solver.plan import CandidatePlan, Estimator, Shape, Stage
from placement.solver.policies.base import Policy
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.solver.view import View
from placement.types import Placement
from profiler.plans import even_stages

THETA = 0.7
LOADED = 1.0  # packing fills GPUs up to this load
MAX_SETS = 64  # sets of GPUs to try for one plan


class Selection(StrEnum):
    """The order of GPUs (section 6, "Load-aware GPU selection")."""

    HYBRID = "hybrid"  # below theta: most loaded first; then the least loaded
    PACKING = "packing"  # below full load: most loaded first
    LEAST_LOADED = "least-loaded"


@dataclass(frozen=True)
class Maveriq(Policy):
    """MaverIQ's policy. `theta`: hybrid's threshold. `uneven`: the fragmentation-aware mapping (off: even
    stages)."""

    selection: Selection = Selection.HYBRID
    theta: float = THETA
    uneven: bool = True

    @property
    def name(self) -> str:
        mapping = "" if self.uneven else "-even"
        return f"maveriq-{self.selection}{mapping}"

    def search(self, shared: Shared, request: Request) -> Placement | None:
        view, estimator = shared.view(request), shared.estimator(request)
        if view.shared:
            return hosts.find(request, view, estimator)
        ranked = list(_ranked(request, view, estimator))
        for number, shape in enumerate(ranked, 1):
            layout = self._place(request, view, shape, estimator)
            if layout is not None:
                reason = f"choice {number} by intent; GPUs by {self.selection}"
                return placed(request, view, layout, estimator, Search(len(ranked), 1, (reason,)))
        return None

    def _place(self, request: Request, view: View, shape: Shape, estimator: Estimator) -> Layout | None:
        for gpus in self._sets(view, shape, total_bytes(estimator, shape, request.model.layers)):
            stages = tuple(tuple(gpus[i : i + shape.tp]) for i in range(0, shape.ranks, shape.tp))
            for layers in self._mappings(request, view, stages, shape, estimator):
                layout = Layout(shape, stages, layers)
                if not fits(view, estimator, layout):
                    continue
                if not excesses(request, shape, estimator(plan_of(view, layout))):
                    return layout
        return None

    def _sets(self, view: View, shape: Shape, need: int) -> Iterator[list[int]]:
        """Sets of TP x PP GPUs of one server and type with enough free memory in total, best first.

        The paper generates all sets; for n GPUs that is n choose TP x PP. This tries only neighbours in the
        order of the selection, which the paper prefers among them.
        """
        servers: dict[tuple[int, int], list[int]] = {}
        for gpu in range(len(view)):
            servers.setdefault((int(view.node[gpu]), int(view.type[gpu])), []).append(gpu)
        windows = []
        for gpus in servers.values():
            ordered = sorted(gpus, key=lambda gpu: (self._preference(view, gpu), gpu))
            for start in range(len(ordered) - shape.ranks + 1):
                window = ordered[start : start + shape.ranks]
                if sum(int(view.usable[gpu]) for gpu in window) >= need:
                    windows.append(
                        (sorted((self._preference(view, g) for g in window), reverse=True), window)
                    )
        for _, window in sorted(windows)[:MAX_SETS]:
            yield sorted(window, key=lambda gpu: (-int(view.usable[gpu]), gpu))

    def _mappings(
        self,
        request: Request,
        view: View,
        stages: Sequence[Sequence[int]],
        shape: Shape,
        estimator: Estimator,
    ) -> Iterator[tuple[int, ...]]:
        """Layers per stage: first by blocks of mem_total / (TP x layers), section 6's equation; then by each
        rank's memory.

        Stage i has GPUs [i TP, (i + 1) TP) of those with most free memory first.
        """
        layers = request.model.layers
        if request.layers or not self.uneven:
            yield request.layers or even_stages(layers, shape.pp)
            return
        free = [min(int(view.usable[gpu]) for gpu in stage) for stage in stages]
        block = total_bytes(estimator, shape, layers) / (shape.tp * layers)
        by_rank = [
            int(most_layers(estimator.lines(shape, stage), np.array([room]))[0])
            for stage, room in enumerate(free)
        ]
        for rooms in ([int(room / block) for room in free], by_rank):
            if sum(rooms) >= layers and min(rooms) >= 1:
                yield round_robin(layers, rooms)

    def _preference(self, view: View, gpu: int) -> tuple[int, float]:
        """The sort key of a GPU; the smallest comes first."""
        load = float(view.load[gpu])
        match self.selection:
            case Selection.LEAST_LOADED:
                return (0, load)
            case Selection.PACKING:
                return (0, -load) if load < LOADED else (1, load)
            case Selection.HYBRID:
                return (0, -load) if load < self.theta else (1, load)


def _ranked(request: Request, view: View, estimator: Estimator) -> Iterator[Shape]:
    """Every shape, best for the intent first (sections 4 and 5): even, on idle GPUs of the commonest type."""
    if not len(view):
        return
    kind = view.type_names[int(np.bincount(view.type).argmax())]
    values: list[tuple[float, float, int, int, Shape]] = []
    for shape in shapes(request, len(view)):
        stages = tuple(Stage(n, kind) for n in even_stages(request.model.layers, shape.pp))
        plan = CandidatePlan(shape, stages, (Link.FAST,) * (shape.pp - 1))
        figures = estimator(plan)
        value = objective(request, shape, figures)
        values.append((value, figures.latency_s, shape.ranks, len(values), shape))
    for *_, shape in sorted(values, key=lambda value: value[:4]):
        yield shape


def round_robin(layers: int, rooms: Sequence[int]) -> tuple[int, ...]:
    """One layer to each stage in turn while it has room; `rooms` hold all layers, so it ends."""
    given, left = [0] * len(rooms), layers
    while left:
        for stage, room in enumerate(rooms):
            if left and given[stage] < room:
                given[stage] += 1
                left -= 1
    return tuple(given)
