"""Groups of GPUs for pipelines: which groups are neighbours, and which few can be the best."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from placement.solver.groups import Groups
from placement.solver.view import Bools, Floats, Ints

MAX_ORDERS = 4  # orders that are kept for one kind of place
BITS = 63  # of a number that encodes several columns

Able = Callable[[Ints, int], Bools]


class Family:
    """Groups that are combined into pipelines. It keeps the sorted orders: sorting takes most of the time,
    and an order for one shape is often the order for others."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        everywhere = np.zeros(len(groups), dtype=np.int64)
        self._places = [groups.nvlink_domain, groups.node, everywhere]
        if _alike(groups.nvlink_domain, groups.node):
            del self._places[0]
        self._by_usable: dict[tuple[int, int], Ints] = {}
        self._by_decode: list[list[Ints]] = [[] for _ in self._places]
        self._bands: dict[int, Groups] = {}

    def band(self, size: int) -> Groups:
        """Groups that fewer than `size` others equal or exceed: `size` of them are the best by any measure
        that rises with usable memory and falls with slowdown."""
        if size not in self._bands:
            self._bands[size] = taken(self.groups, _band(self.groups, size))
        return self._bands[size]

    def sets(self, pp: int, decode: Floats, able: Able) -> Ints:
        """Sets of `pp` columns that are neighbours by seconds of decoding or by usable memory.

        A set is from one NVLink domain, from one node, or from anywhere. For an order of all columns, `able`
        returns the starts at which there may be a set.
        """
        if len(self.groups) < pp:
            return np.empty((0, pp), dtype=np.int64)
        sets = []
        for number, place in enumerate(self._places):
            for order in (self._fastest(number, decode), *(self._roomiest(number, sign) for sign in (-1, 1))):
                same = place[order[: len(order) - pp + 1]] == place[order[pp - 1 :]]
                starts = np.flatnonzero(same & able(order, pp))
                sets.append(order[starts[:, None] + np.arange(pp)])
        return _distinct_rows(np.concatenate(sets), len(self.groups))

    def _roomiest(self, number: int, sign: int) -> Ints:
        """An order by place, then by usable memory times `sign`."""
        at, usable = (number, sign), self.groups.usable
        if at not in self._by_usable:
            self._by_usable[at] = np.lexsort((usable, sign * usable, self._places[number]))
        return self._by_usable[at]

    def _fastest(self, number: int, decode: Floats) -> Ints:
        """An order by place, then by seconds of decoding, then by usable memory."""
        known = self._by_decode[number]
        keys = (self.groups.usable, decode, self._places[number])
        for at, order in enumerate(known):
            if _is_sorted(order, keys):
                known.insert(0, known.pop(at))
                return order
        known.insert(0, np.lexsort(keys))
        del known[MAX_ORDERS:]
        return known[0]


def taken(groups: Groups, columns: Ints) -> Groups:
    """Some of the groups."""
    return Groups(*(getattr(groups, name)[columns] for name in Groups.__dataclass_fields__))


def _alike(one: Ints, other: Ints) -> bool:
    """Whether sorting by one array also sorts by the other."""
    order = np.argsort(one, kind="stable")
    rises, others = np.diff(one[order]) > 0, np.diff(other[order])
    return bool((others[rises] > 0).all() and (others[~rises] == 0).all())


def _is_sorted(order: Ints, keys: Sequence[Floats | Ints]) -> bool:
    """Whether `np.lexsort` would give this order: by the last key, then by the key before it, and then by
    position."""
    right = order[:-1] < order[1:]
    for key in keys:
        here, there = key[order[:-1]], key[order[1:]]
        right = (here < there) | ((here == there) & right)
    return bool(right.all())


def _distinct_rows(rows: Ints, columns: int) -> Ints:
    """The distinct rows of numbers below `columns`, sorted."""
    width = max(1, BITS // max(1, int(columns).bit_length()))
    packed = []
    for start in range(0, rows.shape[1], width):
        number = np.zeros(len(rows), dtype=np.int64)
        for column in range(start, min(start + width, rows.shape[1])):
            number = number * columns + rows[:, column]
        packed.append(number)
    order = np.lexsort(packed[::-1])
    new = np.ones(len(order), dtype=bool)
    if len(order):
        new[1:] = np.any([number[order[1:]] != number[order[:-1]] for number in packed], axis=0)
    distinct: Ints = rows[order[new]]
    return distinct


def _band(groups: Groups, size: int) -> Ints:
    kinds = groups.type * 2 + (groups.nvlink_domain < 0)
    chosen = [np.empty(0, dtype=np.int64)]
    for kind in np.unique(kinds).tolist():
        columns = np.flatnonzero(kinds == kind)
        order = columns[np.lexsort((-groups.usable[columns], groups.slowdown[columns]))]
        chosen.append(order[_above_most(groups.usable[order], size)])
    return np.sort(np.concatenate(chosen))


def _above_most(values: Ints, size: int) -> list[int]:
    """The positions of values that exceed all but fewer than `size` of the earlier values."""
    above = [*range(min(size, len(values)))]
    largest = values[:size].tolist()
    heapq.heapify(largest)
    start = size
    while start < len(values):
        stop = min(len(values), 2 * start)
        for at in (start + np.flatnonzero(values[start:stop] > largest[0])).tolist():
            value = int(values[at])
            if value > largest[0]:
                heapq.heapreplace(largest, value)
                above.append(at)
        start = stop
    return above
