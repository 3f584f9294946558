"""In which order a pipeline's stages stand.

What an order changes: which group is the first stage (it may hold the embedding), which is the last (head,
and seconds beside its layers), and over which links the stages follow each other. So with the two ends
chosen, the order between them matters for links alone, and the best one follows from where the groups are
(`path`). Only where each stage's layers are given does it matter which group is which stage; then all orders
are tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np

from placement.solver.cluster import Link
from placement.solver.costs import Costs
from placement.solver.groups import Groups
from placement.solver.view import Bools, Floats, Ints

MAX_PERMUTED = 6  # stages; of more, whose layers are given, only orders by ends and place are tried


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


def holds(costs: Costs, sets: Ints, layers: int, given: Sequence[int] = ()) -> Bools:
    """Of each set, whether some order of it holds all layers, at least one a stage; with `given`, these."""
    first, middle, last = costs.first[sets], costs.middle[sets], costs.last[sets]
    if given:
        return _hold_given(first, middle, last, given)
    a, b = ends(sets.shape[1]).T
    none = middle < 1
    others = none.sum(axis=1)[:, None] - none[:, a] - none[:, b]
    held = middle.sum(axis=1)[:, None] + (first - middle)[:, a] + (last - middle)[:, b]
    fits = (first[:, a] >= 1) & (last[:, b] >= 1) & (others == 0) & (held >= layers)
    possible: Bools = np.any(fits, axis=1)
    return possible


def _hold_given(first: Ints, middle: Ints, last: Ints, given: Sequence[int]) -> Bools:
    possible = np.zeros(len(first), dtype=bool)
    between = np.sort(np.array(given[1:-1], dtype=np.int64))
    for a, b in ends(first.shape[1]).tolist():
        rest = np.sort(np.delete(middle, (a, b), axis=1), axis=1)
        possible |= (first[:, a] >= given[0]) & (last[:, b] >= given[-1]) & (rest >= between).all(axis=1)
    return possible


def path(groups: Groups, columns: Sequence[int], first: int, last: int) -> tuple[int, ...]:
    """All columns in an order with these ends and the cheapest links between: from node to node as seldom as
    the ends allow, and within a node from NVLink domain to domain.

    A hop to another node costs at least as much as one within a node, which costs at least as much as one
    within a domain. So a node is left once, or, where both ends are on it and others are between, once more.
    """
    place = {k: (int(groups.node[k]), _domain(groups, k)) for k in columns}
    start: list[int] = []
    away: list[int] = []
    end: list[int] = []
    for k in columns:
        if k in (first, last):
            continue
        with_last = place[k] == place[last] != place[first]
        if place[k][0] == place[first][0] and not with_last:
            start.append(k)
        elif place[k][0] == place[last][0]:
            end.append(k)
        else:
            away.append(k)
    start.sort(key=lambda k: (place[k] != place[first], place[k], k))
    away.sort(key=lambda k: (place[k], k))
    end.sort(key=lambda k: (place[k] == place[last], place[k], k))
    return (first, *start, *away, *end, last)


def lower_bounds(
    costs: Costs,
    groups: Groups,
    columns: Ints,
    layers: int,
    tokens: int,
    batches: float,
    hops: dict[Link, tuple[float, float]],
) -> Floats:
    """Of each choice of `ends`: seconds that no split of `layers` is below; infinite where they do not fit.

    Two bounds: the cheapest stages are filled without regard to the slowest; and all take equally long, with
    `batches` in flight and without regard to what each can hold. `hops`: seconds of a prompt and of a token.
    """
    caps, pairs = caps_by_ends(costs, columns), ends(len(columns))
    prefill, decode = costs.prefill[columns], costs.decode[columns]
    rests = costs.prefill_rest[columns][pairs[:, 1]], costs.decode_rest[columns][pairs[:, 1]]
    hop_s = _least_hops(groups, columns) @ np.array([hops[link] for link in Link])
    seconds = prefill + tokens * decode
    order = np.argsort(seconds, kind="stable")
    room = (caps - 1)[:, order]
    taken = 1 + np.clip(layers - len(columns) - (np.cumsum(room, axis=1) - room), 0, room)
    filled = (taken * seconds[order]).sum(axis=1) + tokens * (rests[1] + hop_s[:, 1])
    gaps = np.tile(costs.decode_gap[columns], (len(pairs), 1))
    gaps[np.arange(len(pairs)), pairs[:, 1]] = rests[1]
    pace = batches * (layers + (gaps / decode).sum(axis=1)) / (1 / decode).sum()
    bounds: Floats = np.maximum(filled, layers * prefill.min() + tokens * pace) + rests[0] + hop_s[:, 0]
    possible = (caps.min(axis=1) >= 1) & (caps.sum(axis=1) >= layers)
    return np.where(possible, bounds, np.inf)


def _least_hops(groups: Groups, columns: Ints) -> Ints:
    """(pairs, links): how often each link is crossed at least, with each choice of `ends`."""
    pairs, nodes = ends(len(columns)), groups.node[columns]
    places = {(int(groups.node[k]), _domain(groups, k)) for k in columns.tolist()}
    visited = len(np.unique(nodes))
    left = visited - 1 + ((nodes[pairs[:, 0]] == nodes[pairs[:, 1]]) & (visited > 1))
    # What returns to a node may find a domain it has not been in: then a hop within the node is saved.
    within = len(places) - visited
    crossed = np.zeros((len(pairs), len(Link)), dtype=np.int64)
    crossed[:, Link.NETWORK] = left
    crossed[:, Link.NODE] = within - np.minimum(within, left - (visited - 1))
    crossed[:, Link.FAST] = np.maximum(0, len(columns) - 1 - left - crossed[:, Link.NODE])
    return crossed


def _domain(groups: Groups, column: int) -> int:
    """A group that spans domains is in none: no link to it is fast."""
    domain = int(groups.nvlink_domain[column])
    return domain if domain >= 0 else -1 - column
