"""Exact solvers of equation 8 (`program.py`): our own, and HiGHS.

For a fixed set of widths the program is a multiple-choice knapsack. With a price lambda on bits its
Lagrangian separates into ranks, and the best price gives a bound L. Another width k for rank i raises the
bound by r_ik >= 0. So a solution better than the best known differs from the Lagrangian's in few ranks. Ranks
are tried in order of r_ik by dynamic programming over (bits, error); states that are worse in both are
dropped. The search ends when no remaining rank could close the gap (after Pisinger's minimal core, 1995).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from workers.compression.program import BitProgram, Choice, Floats

_HALVINGS = 200
_TIED = 1e-13
_LARGEST = 1e4  # HiGHS stops at an absolute gap of 1e-6, which is then 1e-10 of the largest error


def allocate(program: BitProgram) -> Choice:
    """The width's column for each rank, int64 [ranks], with the least total error. Exact up to float64's
    rounding.
    """
    knapsacks = sorted((_Knapsack(program, columns) for columns in _subsets(program)), key=lambda k: k.bound)
    best, choice = math.inf, np.zeros(0, dtype=np.int64)
    for knapsack in knapsacks:
        if knapsack.bound >= best:
            break
        found = knapsack.solve(best)
        if found is not None:
            best, choice = program.error(found), found
    return choice


def allocate_by_highs(program: BitProgram, limit_s: float = math.inf) -> Choice:
    """The same as `allocate`, by HiGHS. Raises RuntimeError if it proves no optimum within `limit_s`."""
    ranks, widths = program.errors.shape
    ones, chosen = sparse.eye_array(widths), sparse.csr_array((1, widths))
    unit = math.gcd(*program.bits_per_rank) or 1
    units = np.asarray(program.bits_per_rank, dtype=float) / unit
    coded = (units > 0).astype(float)
    per_rank = sparse.kron(sparse.eye_array(ranks), np.ones((1, widths)))
    budget = sparse.hstack([sparse.csr_array(np.tile(units, ranks)[None]), chosen])
    one_hot = sparse.hstack([per_rank, sparse.csr_array((ranks, widths))])
    selection = sparse.hstack(
        [sparse.eye_array(ranks * widths), -sparse.kron(np.ones((ranks, 1)), ones)],
    )
    number = sparse.hstack([sparse.csr_array((1, ranks * widths)), sparse.csr_array(coded[None])])
    scale = float(program.errors.max()) / _LARGEST or 1.0
    found = optimize.milp(
        np.concatenate([program.errors.ravel() / scale, np.zeros(widths)]),
        constraints=[
            optimize.LinearConstraint(budget.tocsr(), -np.inf, program.budget_bits // unit),
            optimize.LinearConstraint(one_hot.tocsr(), 1, 1),
            optimize.LinearConstraint(selection.tocsr(), -np.inf, 0),
            optimize.LinearConstraint(number.tocsr(), -np.inf, program.max_widths),
        ],
        integrality=np.ones((ranks + 1) * widths),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": limit_s},
    )
    if not found.success:
        raise RuntimeError(f"HiGHS proved no allocation of {program.budget_bits} bits best: {found.message}")
    choice: Choice = found.x[: ranks * widths].reshape(ranks, widths).argmax(axis=1)
    return choice


def _subsets(program: BitProgram) -> Iterator[tuple[int, ...]]:
    """The largest sets of widths that may be used together."""
    size = min(program.max_widths, len(program.coded))
    for used in combinations(program.coded, size):
        yield tuple(sorted((*program.dropped, *used)))


@dataclass(frozen=True)
class _States:
    """Partial solutions: the bits and Lagrangian excess of each, and the steps that led to it."""

    bits: npt.NDArray[np.int64]
    excess: Floats
    parents: npt.NDArray[np.int64]
    moves: npt.NDArray[np.int64]


class _Knapsack:
    """The program with only the widths of `columns`."""

    def __init__(self, program: BitProgram, columns: tuple[int, ...]) -> None:
        self.columns = np.asarray(columns)
        self.errors = program.errors[:, self.columns]
        self.costs = np.asarray(program.bits_per_rank, dtype=np.int64)[self.columns]
        unit = math.gcd(*self.costs.tolist()) or 1
        self.budget = program.budget_bits // unit * unit
        self.price = self._price()
        priced = self.errors + self.price * self.costs
        # Between widths with equal errors, take the cheapest: the Lagrangian's choice must meet the budget.
        order = np.argsort(self.costs, kind="stable")
        self.first = order[priced[:, order].argmin(axis=1)]
        self.reduced = priced - priced.min(axis=1, keepdims=True)
        self.bound = float(priced.min(axis=1).sum() - self.price * self.budget)
        self._fill()

    def solve(self, known: float) -> Choice | None:
        """The best choice if its error is less than `known`, else None."""
        start = int(self.costs[self.first].sum())
        gap = known - self.bound
        if self.price == 0:
            return self.columns[self.first] if gap > 0 else None
        best: tuple[int, int] | None = None
        states = _States(np.array([start]), np.zeros(1), np.zeros(1, dtype=np.int64), self.first[:1])
        levels, tried, settled = [states], list[int](), False
        nearest = np.partition(self.reduced, 1, axis=1)[:, 1]
        order = np.argsort(nearest, kind="stable")
        more, less = self._least_prices(order)
        gap, best = self._closed(states, gap, best, 0)
        for step, row in enumerate(order.tolist()):
            if nearest[row] >= gap or not len(states.bits):
                break
            if settled and self._alike(row, tried[-1]):
                continue
            before, states = states, self._extended(states, row, gap, (more[step], less[step]))
            settled = np.array_equal(before.bits, states.bits) and np.array_equal(
                before.excess, states.excess
            )
            tried.append(row)
            levels.append(states)
            if len(states.bits):
                gap, best = self._closed(states, gap, best, len(tried))
        return None if best is None else self._choice(best, levels, tried)

    def _alike(self, row: int, other: int) -> bool:
        """Whether two ranks offer the same changes: if one changed nothing, neither will the other."""
        same = self.first[row] == self.first[other]
        return bool(same) and np.array_equal(self.reduced[row], self.reduced[other])

    def _price(self) -> float:
        """The least lambda, up to rounding, whose choice meets the budget; 0 if the choice of least error
        does.
        """

        def cost(price: float) -> int:
            priced = self.errors + price * self.costs
            tied = priced == priced.min(axis=1, keepdims=True)
            return int(np.where(tied, self.costs, self.costs.max()).min(axis=1).sum())

        if cost(0.0) <= self.budget:
            return 0.0
        low, high = 0.0, float(self.errors.max()) / int(self.costs[self.costs > 0].min())
        while cost(high) > self.budget:
            high *= 2
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if middle in {low, high}:
                break
            low, high = (middle, high) if cost(middle) > self.budget else (low, middle)
        return high

    def _fill(self) -> None:
        """Give ranks with equally good widths the widest of them, while bits are left."""
        tied = self.reduced <= _TIED * (
            self.errors.max(axis=1, keepdims=True) + self.price * self.costs.max()
        )
        widest = np.where(tied, self.costs, -1).argmax(axis=1)
        added = self.costs[widest] - self.costs[self.first]
        fits = np.cumsum(added) <= self.budget - int(self.costs[self.first].sum())
        self.first = np.where(fits, widest, self.first)
        chosen = self.reduced[np.arange(len(self.first)), self.first]
        self.reduced = np.maximum(self.reduced - chosen[:, None], 0)

    def _least_prices(self, order: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """The least price of the ranks after each in `order`, per bit added and per bit saved: [ranks]
        each.
        """
        change = self.costs - self.costs[self.first][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            price = self.reduced / np.abs(change)
        found = []
        for wanted in (change > 0, change < 0):
            each = np.where(wanted, price, np.inf).min(axis=1)[order]
            after = np.minimum.accumulate(each[::-1])[::-1]
            found.append(np.append(after[1:], np.inf))
        return found[0], found[1]

    def _closed(
        self, states: _States, gap: float, best: tuple[int, int] | None, step: int
    ) -> tuple[float, tuple[int, int] | None]:
        """The gap to the bound, and the position of the best solution: (rows tried, state)."""
        slack = self.budget - states.bits
        above = np.where(slack >= 0, states.excess + self.price * slack, np.inf)
        at = int(above.argmin())
        return (float(above[at]), (step, at)) if above[at] < gap else (gap, best)

    def _extended(self, states: _States, row: int, gap: float, prices: tuple[float, float]) -> _States:
        """The states with all choices for one more row that could still close the gap; only Pareto-optimal
        states.

        `prices` are the least prices at which the remaining ranks take bits and give them back
        (`_least_prices`).
        """
        excess = (states.excess[:, None] + self.reduced[row]).ravel()
        bits = (states.bits[:, None] + self.costs - self.costs[self.first[row]]).ravel()
        slack = self.budget - bits
        with np.errstate(invalid="ignore"):  # if no bits are missing, an infinite price gives NaN
            missing = np.where(slack < 0, -slack * prices[1], slack * min(self.price, prices[0]))
        keep = np.flatnonzero(excess + missing < gap)
        keep = keep[np.lexsort((excess[keep], bits[keep]))]
        errors = excess[keep] - self.price * bits[keep]
        least = np.minimum.accumulate(errors)
        better = np.ones(len(keep), dtype=bool)
        better[1:] = errors[1:] < least[:-1]
        keep = keep[better]
        return _States(bits[keep], excess[keep], keep // len(self.costs), keep % len(self.costs))

    def _choice(self, best: tuple[int, int], levels: list[_States], tried: list[int]) -> Choice:
        choice, (step, at) = self.first.copy(), best
        for level in range(step, 0, -1):
            choice[tried[level - 1]] = levels[level].moves[at]
            at = int(levels[level].parents[at])
        found: Choice = self.columns[choice]
        return found
