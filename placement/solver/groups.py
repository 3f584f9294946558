"""GPUs that could carry a stage together: TP GPUs of one type on one node, as columns of arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from placement.solver.cluster import Link
from placement.solver.view import Floats, Ints, View

MAX_GROUPS = 80  # enumerated completely; beyond that, only neighbours in some order


class GroupKind(NamedTuple):
    """The groups of one type of GPU that one kind of link joins, by their columns."""

    type: int
    link: Link
    columns: Ints


@dataclass(frozen=True)
class Groups:
    """One column per group. `usable` is that of its fullest GPU, `slowdown` that of its slowest.

    `nvlink_domain` is -1 if a group spans domains. With `fill` = sum of free / total and `grain` = sum of
    1 / total, placing b bytes on each GPU costs the next model 2 b fill - b^2 grain (`policies.joint`).
    """

    members: Ints  # (groups, tp), indices into the view
    node: Ints
    type: Ints
    nvlink_domain: Ints
    usable: Ints
    slowdown: Floats
    fill: Floats
    grain: Floats

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def kinds(self) -> tuple[GroupKind, ...]:
        spans = self.nvlink_domain < 0
        kinds = (
            GroupKind(number, link, np.flatnonzero(where & (self.type == number)))
            for number in np.unique(self.type).tolist()
            for link, where in ((Link.FAST, ~spans), (Link.NODE, spans))
        )
        return tuple(kind for kind in kinds if len(kind.columns))

    def link(self, column: int) -> Link:
        return Link.FAST if self.nvlink_domain[column] >= 0 else Link.NODE


def groups_of(view: View, members: Ints) -> Groups:
    domains = view.nvlink_domain[members]
    joined = (domains == domains[:, :1]).all(axis=1)
    return Groups(
        members=members,
        node=view.node[members[:, 0]],
        type=view.type[members[:, 0]],
        nvlink_domain=np.where(joined, domains[:, 0], -1),
        usable=view.usable[members].min(axis=1),
        slowdown=view.slowdown[members].max(axis=1),
        fill=(view.free[members] / view.total[members]).sum(axis=1),
        grain=(1 / view.total[members]).sum(axis=1),
    )


def every_group(view: View, tp: int, max_groups: int = MAX_GROUPS) -> Groups | None:
    """All groups of `tp` GPUs, or None when there are more than `max_groups`."""
    _, sizes = np.unique(runs_of(view), return_counts=True)
    if sum(math.comb(size, tp) for size in sizes.tolist()) > max_groups:
        return None
    members = [group for run in _runs(view) for group in itertools.combinations(run, tp)]
    return groups_of(view, np.array(members, dtype=np.int64).reshape(-1, tp))


def neighbours(view: View, tp: int, *, disjoint: bool) -> tuple[Groups, ...]:
    """Groups of GPUs that are neighbours by usable memory or by slowdown, in an NVLink domain or a node.

    Each order within each kind of place is a family of its own. A group is as good as its worst member, so
    similar GPUs belong together. With `disjoint` no two groups of a family share a GPU.
    """
    orders: tuple[tuple[Floats | Ints, ...], ...] = (
        (view.usable, view.slowdown),
        (view.slowdown, -view.usable),
    )
    if tp == 1:
        return (groups_of(view, np.arange(len(view), dtype=np.int64).reshape(-1, 1)),)
    places = (
        (view.nvlink_domain,) if _same(view.nvlink_domain, view.node) else (view.nvlink_domain, view.node)
    )
    return tuple(
        groups_of(view, _windows(view, place, keys, tp, disjoint)) for place in places for keys in orders
    )


def distinct(groups: Sequence[Groups]) -> Groups:
    """Several families as one."""
    joined = (np.concatenate([getattr(g, name) for g in groups]) for name in Groups.__dataclass_fields__)
    return Groups(*joined)


def every_set(groups: Groups, pp: int, max_sets: int) -> Ints | None:
    """All sets of `pp` groups that share no GPU, or None if there are more than `max_sets` candidates."""
    if math.comb(len(groups), pp) > max_sets:
        return None
    members = [frozenset(row) for row in groups.members.tolist()]
    tp = groups.members.shape[1]
    sets = [
        pick
        for pick in itertools.combinations(range(len(groups)), pp)
        if len(frozenset().union(*(members[k] for k in pick))) == pp * tp
    ]
    return np.array(sets, dtype=np.int64).reshape(-1, pp)


def runs_of(view: View) -> Ints:
    """A number for each GPU, equal for GPUs of one node and type."""
    return view.node * len(view.types) + view.type


def _runs(view: View) -> list[list[int]]:
    """Lists of GPUs of one node and type."""
    runs: dict[int, list[int]] = {}
    for number, key in enumerate(runs_of(view).tolist()):
        runs.setdefault(key, []).append(number)
    return list(runs.values())


def _windows(view: View, place: Ints, keys: Sequence[Floats | Ints], tp: int, disjoint: bool) -> Ints:
    order = np.lexsort((*reversed(keys), view.type, place))
    if len(order) < tp:
        return np.empty((0, tp), dtype=np.int64)
    windows = sliding_window_view(order, tp)
    run = (place * len(view.types) + view.type)[order]
    starts = np.arange(len(windows))
    keep = run[starts] == run[starts + tp - 1]
    if disjoint:
        first = np.searchsorted(run, run[starts])  # runs are ascending in this order
        keep &= (starts - first) % tp == 0
    kept: Ints = windows[keep]
    return kept


def _same(one: Ints, other: Ints) -> bool:
    """Whether both arrays divide the GPUs in the same way."""
    pairs = len(np.unique(one * (other.max(initial=0) + 1) + other))
    return pairs == len(np.unique(one)) == len(np.unique(other))
