"""Many groups in order of a request's cost there, so that a pick considers few of them. Compiled.

A snapshot of more than LOOK_AT_ALL groups keeps them in ORDERS orders, by

- FRESH: the cost of a typical request whose variant is not there, so that it takes a slot
- BASE: the cost of a typical request of the base
- FAST: the time per token

Each order is sorted by shelf first. A shelf has the groups of one step model and one ceiling with similar
promises (the tightest is within a factor of two) and, if kernels pad, with their largest rank in one class.
Groups that are not usable are on the last shelf. Among equals the lower `key` comes first, so the order of
the groups in a snapshot does not matter.

`put` moves one group to its place: a binary search, and a step for every group that it passes. All of
`controlplane.routing.bookkeeping` does that. Code that changes a group in another way calls `put`, or
`invalidate` after many changes: then the next pick sorts all groups again. The place of a variant
(`Snapshot.held`) is not part of any order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from controlplane.routing.prospect import prospect
from controlplane.routing.scorers.pressure import slot_s
from controlplane.routing.scorers.total import NOT_KNOWN_S, cost_s
from controlplane.routing.snapshot import NO_PROMISE, ORDERS, PROMISES, Snapshot
from profiler.compiled import Records, compiled
from profiler.step_time.records import CLASSES
from profiler.step_time.steps import largest_class

FRESH, BASE, FAST = range(ORDERS)
NOT_ORDERED, UNUSABLE = 0, 1 << 30  # shelves; the shelves of usable groups lie between
TYPICAL_TOKENS = 200.0
_CEILINGS = 100
_ALIKE = 35  # classes of promises; PROMISE_RATIO ** 35 is 2
_TIGHTNESS = PROMISES // _ALIKE + 1


class Typical(NamedTuple):
    """A request with the field names of REQUEST."""

    variant: int
    prompt: float
    output: float
    ttft_s: float
    tpot_s: float
    waited_s: float
    cached: float
    home: int
    promise: int


@compiled
def keeps_orders(snapshot: Snapshot) -> bool:
    return bool(snapshot.orders.shape[1] > 0)


@compiled
def put(snapshot: Snapshot, g: int) -> None:
    """The group has changed: move it to its place."""
    if keeps_orders(snapshot) and snapshot.orders[0, 0].shelf != NOT_ORDERED:
        _note_keys(snapshot, g)
        for order in range(ORDERS):
            _move(snapshot.orders, order, g)


@compiled
def put_all(snapshot: Snapshot) -> None:
    for g in range(snapshot.orders.shape[1]):
        put(snapshot, g)


def invalidate(snapshot: Snapshot) -> None:
    """Any group may have changed: the next pick sorts all groups again."""
    if snapshot.orders.size:
        snapshot.orders[0, 0].shelf = NOT_ORDERED


@compiled
def order_all(snapshot: Snapshot) -> None:
    """Sort all groups, from nothing or from any order. Fast if the order is nearly right."""
    orders = snapshot.orders
    for order in range(ORDERS):
        if orders[order, 0].group == orders[order, 1].group:  # it was never sorted
            for g in range(orders.shape[1]):
                orders[order, g].group = orders[order, g].place = g
    for g in range(orders.shape[1]):
        _note_keys(snapshot, g)
    for order in range(ORDERS):
        for place in range(1, orders.shape[1]):
            _move_up(orders, order, orders[order, place].group)


@compiled
def _note_keys(snapshot: Snapshot, g: int) -> None:
    """Note the current sort keys of a group."""
    group, orders, shelf = snapshot.groups[g], snapshot.orders, shelf_of(snapshot, g)
    model = snapshot.models[group.model]
    typical = Typical(0, TYPICAL_TOKENS, TYPICAL_TOKENS, math.inf, math.inf, 0.0, 0.0, -1, NO_PROMISE)
    base_s = cost_s(snapshot, g, typical, prospect(snapshot, g, typical), False)
    orders[BASE, g].key = base_s
    orders[FRESH, g].key = _known(base_s + slot_s(model, group.distinct, 0))
    orders[FAST, g].key = _known(group.tpot_s)
    for order in range(ORDERS):
        orders[order, g].shelf, orders[order, g].tie = shelf, group.key


@compiled
def _known(seconds: float) -> float:
    return seconds if -NOT_KNOWN_S < seconds < NOT_KNOWN_S else NOT_KNOWN_S


@compiled
def shelf_of(snapshot: Snapshot, g: int) -> int:
    group = snapshot.groups[g]
    if not group.usable:
        return UNUSABLE
    largest = largest_class(group.batch) if snapshot.models[group.model].padded_s > 0.0 else 0
    ceiling = max(0, min(group.ceiling, _CEILINGS - 1))
    tightness = max(0, min(group.tightest, NO_PROMISE)) // _ALIKE
    shelf = (group.model * _CEILINGS + ceiling) * CLASSES + largest
    return 1 + shelf * _TIGHTNESS + tightness  # type: ignore[no-any-return]


@compiled
def ceiling_of(shelf: int) -> int:
    return (shelf - 1) // (CLASSES * _TIGHTNESS) % _CEILINGS


@compiled
def model_of(shelf: int) -> int:
    return (shelf - 1) // (CLASSES * _TIGHTNESS * _CEILINGS)


@compiled
def shelf_at(orders: Records, place: int) -> int:
    """The shelf of the group at a place, the same in every order; UNUSABLE after the last."""
    if place >= orders.shape[1]:
        return UNUSABLE
    return orders[0, orders[0, place].group].shelf  # type: ignore[no-any-return]


@compiled
def shelf_end(orders: Records, place: int) -> int:
    """The first place after `place` on another shelf."""
    shelf, low, high = shelf_at(orders, place), place + 1, orders.shape[1]
    while low < high:
        middle = (low + high) // 2
        if shelf_at(orders, middle) == shelf:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def is_before(orders: Records, order: int, one: int, other: int) -> bool:
    a, b = orders[order, one], orders[order, other]
    if a.shelf != b.shelf:
        return bool(a.shelf < b.shelf)
    if a.key != b.key:
        return bool(a.key < b.key)
    return bool(a.tie < b.tie)


@compiled
def _move(orders: Records, order: int, g: int) -> None:
    place = orders[order, g].place
    if place > 0 and is_before(orders, order, g, orders[order, place - 1].group):
        _move_up(orders, order, g)
    else:
        _move_down(orders, order, g)


@compiled
def _move_up(orders: Records, order: int, g: int) -> None:
    """Move to the first place whose group it precedes; the groups before it are in order."""
    low, high = 0, orders[order, g].place
    since = high
    while low < high:
        middle = (low + high) // 2
        if is_before(orders, order, g, orders[order, middle].group):
            high = middle
        else:
            low = middle + 1
    for place in range(since, low, -1):
        _stand(orders, order, orders[order, place - 1].group, place)
    _stand(orders, order, g, low)


@compiled
def _move_down(orders: Records, order: int, g: int) -> None:
    """Move to the last place whose group precedes it; the groups after it are in order."""
    since, high = orders[order, g].place, orders.shape[1] - 1
    low = since
    while low < high:
        middle = (low + high + 1) // 2
        if is_before(orders, order, orders[order, middle].group, g):
            low = middle
        else:
            high = middle - 1
    for place in range(since, low):
        _stand(orders, order, orders[order, place + 1].group, place)
    _stand(orders, order, g, low)


@compiled
def _stand(orders: Records, order: int, g: int, place: int) -> None:
    orders[order, place].group = g
    orders[order, g].place = place
