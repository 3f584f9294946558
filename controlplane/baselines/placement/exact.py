"""The exact reference: one mixed-integer linear program per shape, solved by HiGHS.

For small instances only: every group of GPUs is a column. With y[s,k] = stage s runs on group k, l[s,k] its
layers there, u[s] = stages s and s+1 are in different NVLink domains, v[s] = on different nodes, and
tau = seconds per output token:

    minimise    sum l prefill + rest + hops + (output - 1) tau
    subject to  tau >= sum l decode + rest + hops,   tau >= groups (l decode + rest or gap)   for every stage,
                tau >= turns
                sum_k y[s,k] = 1,   y <= l <= cap y,   sum l = layers,   each GPU in one stage at most
                u[s] >= a[i,s] - a[i,s+1] for every domain i,  v[s] in the same way for every node

Memory, rate, heads and headroom are in the caps and columns. Within a shape every intent falls with latency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from placement.solver import hosts
from placement.solver.cluster import Link
from placement.solver.costs import Costs, costs_of
from placement.solver.groups import Groups, every_group
from placement.solver.layout import Layout, Search, placed, plan_of
from placement.solver.memory import total_bytes
from placement.solver.objective import GIB, excesses, objective
from placement.solver.places import Shared
from placement.solver.plan import Estimator, Shape
from placement.solver.policies.base import Policy
from placement.solver.request import Request
from placement.solver.shapes import shapes
from placement.solver.view import Floats, Ints, View
from placement.types import CostMeasure, Placement

MAX_GPUS = 16
GAP = 1e-6  # HiGHS's relative gap


@dataclass(frozen=True)
class Exact(Policy):
    @property
    def name(self) -> str:
        return "exact"

    def search(self, shared: Shared, request: Request) -> Placement | None:
        """Search for the optimal placement. Raises ValueError for clusters of more than 16 GPUs."""
        if shared.cluster.gpu_count > MAX_GPUS:
            raise ValueError(
                f"the exact policy takes at most {MAX_GPUS} GPUs, got {shared.cluster.gpu_count}; use "
                "another policy"
            )
        view, estimator = shared.view(request), shared.estimator(request)
        if view.shared:
            return hosts.find(request, view, estimator)
        best: tuple[float, Layout] | None = None
        every = shapes(request, len(view))
        for shape in every:
            layout = _solve(request, view, shape, estimator)
            if layout is None:
                continue
            figures = estimator(plan_of(view, layout))
            value = objective(request, shape, figures)
            if not excesses(request, shape, figures) and (best is None or value < best[0]):
                best = (value, layout)
        if best is None:
            return None
        how = Search(len(every), 1, ("optimal, by a mixed-integer linear program",))
        return placed(request, view, best[1], estimator, how)


class _Rows:
    """Constraints low <= row x <= high, collected row by row."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[Floats] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, row: Floats, low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def constraint(self) -> LinearConstraint:
        return LinearConstraint(np.array(self.rows), self.low, self.high)


@dataclass(frozen=True)
class _Program:
    """The position of each variable: y and l by stage and group, then u and v by hop, then tau."""

    pp: int
    columns: int

    @property
    def width(self) -> int:
        return 2 * self.pp * self.columns + 2 * (self.pp - 1) + 1

    def y(self, stage: int) -> slice:
        return slice(stage * self.columns, (stage + 1) * self.columns)

    def l(self, stage: int) -> slice:  # noqa: E743 - the name in the formulas
        return slice((self.pp + stage) * self.columns, (self.pp + stage + 1) * self.columns)

    def u(self, hop: int) -> int:
        return 2 * self.pp * self.columns + hop

    def v(self, hop: int) -> int:
        return self.u(self.pp - 1) + hop

    @property
    def tau(self) -> int:
        return self.width - 1

    def row(self) -> Floats:
        return np.zeros(self.width)


def _solve(request: Request, view: View, shape: Shape, estimator: Estimator) -> Layout | None:
    groups = every_group(view, shape.tp, max_groups=10**6)
    if groups is None or not len(groups):
        return None
    costs = costs_of(request, shape, view, groups, estimator)
    at = _Program(shape.pp, len(groups))
    prompt, token, constant = _seconds(at, shape, costs, estimator)
    rows = _Rows(at.width)
    _add_structure(rows, at, request, groups, costs, len(view))
    _add_pace(rows, at, costs, token, constant[1], estimator.groups(shape))
    goal = prompt.copy()
    goal[at.tau] = request.output_tokens - 1
    memory = total_bytes(estimator, shape, request.model.layers)
    apart_s = constant[0] + estimator.path_s
    _add_limits(rows, at, request, _latency_of_cost(request, shape, memory), (prompt, goal), apart_s)
    least = at.row()
    least[at.tau] = estimator.turns_s(shape)
    solution = milp(
        goal,
        constraints=rows.constraint(),
        bounds=Bounds(least, _upper(at, costs)),
        integrality=_integers(at),
        options={"mip_rel_gap": GAP},
    )
    return None if solution.x is None else _layout(at, shape, groups, solution.x)


def _seconds(
    at: _Program, shape: Shape, costs: Costs, estimator: Estimator
) -> tuple[Floats, Floats, tuple[float, float]]:
    """Rows for the seconds of the prompt and of a token, and the constant that both also have."""
    hops = np.array([estimator.hop_s(shape, link) for link in Link])  # (links, prompt and token)
    rows = []
    for which, layer, rest in (
        (0, costs.prefill, costs.prefill_rest),
        (1, costs.decode, costs.decode_rest),
    ):
        row = at.row()
        for stage in range(at.pp):
            row[at.l(stage)] = layer
        row[at.y(at.pp - 1)] = rest
        for hop in range(at.pp - 1):
            row[at.u(hop)] = hops[Link.NODE, which] - hops[Link.FAST, which]
            row[at.v(hop)] = hops[Link.NETWORK, which] - hops[Link.NODE, which]
        rows.append(row)
    fast = hops[Link.FAST] * (at.pp - 1)
    return rows[0], rows[1], (float(fast[0]), float(fast[1]))


def _add_structure(
    rows: _Rows, at: _Program, request: Request, groups: Groups, costs: Costs, gpus: int
) -> None:
    every, identity = at.row(), np.eye(at.columns)
    for stage in range(at.pp):
        chosen = at.row()
        chosen[at.y(stage)] = 1
        rows.add(chosen, 1, 1)
        every[at.l(stage)] = 1
        for column, cap in enumerate(costs.caps(stage, at.pp).tolist()):
            most, least = at.row(), at.row()
            most[at.l(stage)], most[at.y(stage)] = identity[column], -cap * identity[column]
            least[at.l(stage)], least[at.y(stage)] = identity[column], -identity[column]
            rows.add(most, high=0)
            rows.add(least, low=0)
    rows.add(every, request.model.layers, request.model.layers)
    for stage, layers in enumerate(request.layers):
        given = at.row()
        given[at.l(stage)] = 1
        rows.add(given, layers, layers)
    for gpu in range(gpus):
        once = at.row()
        for stage in range(at.pp):
            once[at.y(stage)] = (groups.members == gpu).any(axis=1)
        rows.add(once, high=1)
    _add_hops(rows, at, groups.nvlink_domain, at.u)
    _add_hops(rows, at, groups.node, at.v)


def _add_hops(rows: _Rows, at: _Program, places: Ints, variable: Callable[[int], int]) -> None:
    """Set the hop's variable to 1 where its stages are in different places; -1 marks a group without a
    place."""
    for hop in range(at.pp - 1):
        for place in np.unique(places).tolist():
            row = at.row()
            row[variable(hop)] = 1
            row[at.y(hop)] = -(places == place).astype(float)
            if place >= 0:
                row[at.y(hop + 1)] = (places == place).astype(float)
            rows.add(row, low=0)


def _add_pace(
    rows: _Rows, at: _Program, costs: Costs, token: Floats, constant_s: float, groups: float
) -> None:
    one_after_the_other = -token
    one_after_the_other[at.tau] = 1
    rows.add(one_after_the_other, low=constant_s)
    for stage in range(at.pp):
        slowest = at.row()
        slowest[at.tau] = 1
        slowest[at.l(stage)] = -groups * costs.decode
        slowest[at.y(stage)] = -groups * (costs.decode_rest if stage == at.pp - 1 else costs.decode_gap)
        rows.add(slowest, low=0)


def _add_limits(
    rows: _Rows, at: _Program, request: Request, most_s: float, seconds: tuple[Floats, Floats], apart_s: float
) -> None:
    """Add the limits. `seconds`: rows of the prompt and of the whole request, both without `apart_s`, the
    fast part of the hops and the request path."""
    prompt, whole = seconds
    limits = request.slos
    latency_s = min(limits.latency_s or np.inf, most_s)
    rows.add(prompt, high=(limits.ttft_s or np.inf) - apart_s)
    rows.add(whole, high=latency_s - apart_s)
    token = at.row()
    token[at.tau] = 1
    rows.add(token, high=limits.tpot_s or np.inf)


def _latency_of_cost(request: Request, shape: Shape, memory_bytes: int) -> float:
    """The latency at which the cost limit is met exactly; a limit on memory is checked afterwards."""
    if request.slos.cost is None or request.cost is CostMeasure.MEMORY:
        return float(np.inf)
    if request.cost is CostMeasure.GPU_HOURS:
        return request.slos.cost * 3600 / shape.ranks
    return request.slos.cost / (memory_bytes / GIB)


def _upper(at: _Program, costs: Costs) -> Floats:
    upper = np.ones(at.width)
    for stage in range(at.pp):
        upper[at.l(stage)] = costs.caps(stage, at.pp)
    upper[at.tau] = np.inf
    return upper


def _integers(at: _Program) -> Ints:
    """The integer variables: y and l; u and v follow from y."""
    kinds = np.zeros(at.width, dtype=np.int64)
    kinds[: 2 * at.pp * at.columns] = 1
    return kinds


def _layout(at: _Program, shape: Shape, groups: Groups, solution: Floats) -> Layout:
    columns = [int(np.argmax(solution[at.y(stage)])) for stage in range(at.pp)]
    layers = tuple(round(float(solution[at.l(stage)][k])) for stage, k in enumerate(columns))
    return Layout(shape, tuple(tuple(groups.members[k].tolist()) for k in columns), layers)
