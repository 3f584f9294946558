"""The order of a pipeline's stages.

An order decides which group is the first stage (which may hold the embedding), which is the last (head, and
seconds outside its layers), and over which links the stages are connected. So with both ends chosen, the
order between them affects only links, and the best order follows from the groups' places (`path`). If each
stage's layers are given, it also matters which group is which stage; then all orders are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np

from placement.solver.costs import Costs
from placement.solver.groups import Groups
from placement.solver.view import Bools, Ints

MANY = 1 << 32  # layers: more than any pipeline has
NEVER = 1 << 48
MAX_PERMUTED = 6  # stages; longer pipelines with given layers only try orders by ends and place


@cache
def ends(stages: int) -> Ints:
    """(pairs, 2): every first and last stage, as positions in a set of at least two."""
    pairs = np.array(list(itertools.permutations(range(stages), 2)), dtype=np.int64)
    pairs.setflags(write=False)
    return pairs


def caps_by_ends(costs: Costs, columns: Ints) -> Ints:
    """(pairs, stages): the most layers of each group of a set, for each choice of `ends`."""
    pairs = ends(len(columns))
    rows = np.arange(len(pairs))
    caps = np.tile(costs.middle[columns], (len(pairs), 1))
    caps[rows, pairs[:, 0]] = costs.first[columns][pairs[:, 0]]
    caps[rows, pairs[:, 1]] = costs.last[columns][pairs[:, 1]]
    return caps


def may_hold(costs: Costs, layers: int, order: Ints, stages: int) -> Bools:
    """For every `stages` neighbours in `order`, whether they may hold all layers. False: they do not."""
    most = np.maximum(np.maximum(costs.first, costs.last), costs.middle)[order]
    none = (costs.middle < 1)[order]
    possible: Bools = (_sums(most, stages) >= layers) & (_sums(none, stages) <= 2)  # the ends
    return possible


def _sums(values: Ints | Bools, count: int) -> Ints:
    """The sums of every `count` neighbouring values."""
    until: Ints = np.concatenate([[0], np.cumsum(values)])
    sums: Ints = until[count:] - until[:-count]
    return sums


def holds(costs: Costs, sets: Ints, layers: int, given: Sequence[int] = ()) -> Bools:
    """For each set, whether some order holds all layers, at least one per stage; `given`: these layers."""
    first, middle, last = costs.first[sets], costs.middle[sets], costs.last[sets]
    if given:
        return _hold_given(first, middle, last, given)
    # A group that holds no layer between the ends has to be an end: as an end it counts most.
    more = np.where(middle < 1, MANY, 0) - middle
    as_first = np.where(first >= 1, first + more, -NEVER)
    as_last = np.where(last >= 1, last + more, -NEVER)
    held = middle.sum(axis=1) + _best_pair(as_first, as_last)
    possible: Bools = held >= layers + MANY * (middle < 1).sum(axis=1)
    return possible


def _best_pair(one: Ints, other: Ints) -> Ints:
    """For each row, the largest sum of an entry of `one` and an entry of `other` in another column."""
    rows = np.arange(len(one))
    best, others_best = one.argmax(axis=1), other.argmax(axis=1)
    most, others_most = one[rows, best], other[rows, others_best]
    one, other = one.copy(), other.copy()
    one[rows, best] = other[rows, others_best] = -2 * NEVER
    apart = np.maximum(most + other.max(axis=1), one.max(axis=1) + others_most)
    pairs: Ints = np.where(best == others_best, apart, most + others_most)
    return pairs


def _hold_given(first: Ints, middle: Ints, last: Ints, given: Sequence[int]) -> Bools:
    possible = np.zeros(len(first), dtype=bool)
    between = np.sort(np.array(given[1:-1], dtype=np.int64))
    for a, b in ends(first.shape[1]).tolist():
        rest = np.sort(np.delete(middle, (a, b), axis=1), axis=1)
        possible |= (first[:, a] >= given[0]) & (last[:, b] >= given[-1]) & (rest >= between).all(axis=1)
    return possible


def path(groups: Groups, columns: Sequence[int], first: int, last: int) -> tuple[int, ...]:
    """All columns in an order with these ends and the cheapest links between. The path changes nodes as
    rarely as the ends allow, and within a node it goes from NVLink domain to domain.

    A hop to another node costs at least as much as one within a node, which costs at least as much as one
    within a domain. So the path leaves a node once, or twice if both ends are on it and other nodes are
    between.
    """
    place = {k: (int(groups.node[k]), domain(groups, k)) for k in columns}
    start: list[int] = []
    away: list[int] = []
    end: list[int] = []
    for k in columns:
        if k in (first, last):
            continue
        with_last = place[k] == place[last] != place[first]
        if groups.node[k] == groups.node[first] and not with_last:
            start.append(k)
        elif groups.node[k] == groups.node[last]:
            end.append(k)
        else:
            away.append(k)
    start.sort(key=lambda k: (place[k] != place[first], place[k], k))
    away.sort(key=lambda k: (place[k], k))
    end.sort(key=lambda k: (place[k] == place[last], place[k], k))
    return (first, *start, *away, *end, last)


def domain(groups: Groups, column: int) -> int:
    """A number for the group's NVLink domain. A group that spans domains is in none: no link to it is
    fast."""
    domain = int(groups.nvlink_domain[column])
    return domain if domain >= 0 else -1 - column
