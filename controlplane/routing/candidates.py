"""The groups that a pick considers: all of up to LOOK_AT_ALL, otherwise those that may cost least. Compiled.

The cost function determines these groups. A group is cheap because it has little work, or because it has
something that the request needs:

- the group that has the beginning of the request's prompt cached
- groups that have its variant in a slot, or on its way there, or among their rows: no load, no other slot
- groups that have the variant in the host's memory, because reading it from elsewhere may take seconds
- the first groups of every order of each shelf (`controlplane.routing.orders`)

If more than NEAR groups have the variant, or more than HOST have it in memory, the first ones in order are
taken. Among equals the request's key chooses, so that requests and gateways do not all consider the same idle
groups. However many groups there are, the cost is computed for at most NEAR + HOST + sum(FIRST) + 1 groups of
a pool, and the same number of all others. If these are on several shelves, it is at most 5 FEWEST of each
shelf, if that is more. In addition, 8 bytes of each group are read.
"""

from __future__ import annotations

import numpy as np

from controlplane.routing.chance import pair
from controlplane.routing.orders import (
    BASE,
    FRESH,
    UNUSABLE,
    ceiling_of,
    keeps_orders,
    shelf_at,
    shelf_end,
)
from controlplane.routing.snapshot import IN_HOST_MEMORY, LOADING, LOOK_AT_ALL, ORDERS, Snapshot
from profiler.compiled import Records, compiled

NEAR, HOST = 24, 12
FIRST = (16, 8, 8)  # of a shelf, in each order
FEWEST = 4  # of each shelf, for any number of shelves
_ELSEWHERE, _HOST, _NEAR = range(3)


@compiled
def gather(snapshot: Snapshot, request: Records, ceiling: int, in_pool: bool) -> int:
    """The number of candidates: at least the groups that may cost least, of the pool with that ceiling, or of
    all other pools. `candidate` returns them. Some may be of other pools, or unusable."""
    orders = snapshot.orders
    if not keeps_orders(snapshot):
        return len(snapshot.groups)
    orders[0, 0].picks += 1
    shelves, groups = _size(orders, ceiling, in_pool)
    looks_at_all = groups <= LOOK_AT_ALL
    near, host = (0, 0) if looks_at_all else _having(snapshot, request.variant)
    most_near = _part(NEAR, shelves) if near > NEAR else 0
    most_host = _part(HOST, shelves) if host > HOST else 0
    count, place = 0, 0
    while shelf_at(orders, place) != UNUSABLE:
        end = shelf_end(orders, place)
        if _is_asked(orders, place, ceiling, in_pool):
            if looks_at_all:
                count = _add_all(orders, place, end, count)
            else:
                count = _add_first(orders, place, end, shelves, request.key, count)
                count = _add_some(snapshot, request, place, end, _NEAR, most_near, count)
                count = _add_some(snapshot, request, place, end, _HOST, most_host, count)
        place = end
    return count if looks_at_all else _add_few(snapshot, request, near, host, count)


@compiled
def _is_asked(orders: Records, place: int, ceiling: int, in_pool: bool) -> bool:
    return (ceiling_of(shelf_at(orders, place)) == ceiling) == in_pool


@compiled
def _size(orders: Records, ceiling: int, in_pool: bool) -> tuple[int, int]:
    """The number of shelves of the pool, or of all others, and the number of their groups."""
    shelves, groups, place = 0, 0, 0
    while shelf_at(orders, place) != UNUSABLE:
        end = shelf_end(orders, place)
        if _is_asked(orders, place, ceiling, in_pool):
            shelves, groups = shelves + 1, groups + end - place
        place = end
    return shelves, groups


@compiled
def _having(snapshot: Snapshot, variant: int) -> tuple[int, int]:
    """The number of groups that have a variant near, and in the host's memory. The base is everywhere."""
    near = host = 0
    if variant:
        for g in range(len(snapshot.groups)):
            distance = _distance(snapshot, g, variant)
            near += 1 if distance == _NEAR else 0
            host += 1 if distance == _HOST else 0
    return near, host


@compiled
def candidate(snapshot: Snapshot, number: int) -> int:
    """A group by its number among the candidates of the last call of `gather`."""
    return snapshot.orders[0, number].candidate if keeps_orders(snapshot) else number


@compiled
def _distance(snapshot: Snapshot, g: int, variant: int) -> int:
    held = snapshot.held[variant, g]
    if held.rows > 0 or held.where >= LOADING:
        return _NEAR
    return _HOST if held.where == IN_HOST_MEMORY else _ELSEWHERE


@compiled
def _part(most: int, shelves: int) -> int:
    return max(FEWEST, most // shelves)


@compiled
def _add(orders: Records, g: int, count: int) -> int:
    """Add a candidate, unless it is one already. Returns the new number of candidates."""
    if orders[0, g].picks_seen == orders[0, 0].picks:
        return count
    orders[0, g].picks_seen = orders[0, 0].picks
    orders[0, count].candidate = g
    return count + 1


@compiled
def _add_all(orders: Records, begin: int, end: int, count: int) -> int:
    for place in range(begin, end):
        count = _add(orders, orders[0, place].group, count)
    return count


@compiled
def _add_few(snapshot: Snapshot, request: Records, near: int, host: int, count: int) -> int:
    """Add the group that may have the prompt's beginning, and all that have the variant if these are few."""
    if 0 <= request.home < len(snapshot.groups) and request.cached > 0.0:
        count = _add(snapshot.orders, request.home, count)
    if 0 < near <= NEAR or 0 < host <= HOST:
        for g in range(len(snapshot.groups)):
            distance = _distance(snapshot, g, request.variant)
            if (distance == _NEAR and near <= NEAR) or (distance == _HOST and host <= HOST):
                count = _add(snapshot.orders, g, count)
    return count


@compiled
def _add_some(
    snapshot: Snapshot, request: Records, begin: int, end: int, distance: int, most: int, count: int
) -> int:
    """Add the first `most` groups of a shelf at this distance of the variant. If many groups at the front are
    equal, because all are idle, the request's key determines where to begin."""
    orders, order, found = snapshot.orders, BASE if distance == _NEAR else FRESH, 0
    if most == 0:
        return count
    _, after = _equals(orders, order, begin, begin + 1, end)
    since = _drawn(request.key, distance, after - begin)
    for i in range(end - begin):
        if found == most:
            break
        place = begin + i if begin + i >= after else begin + (since + i) % (after - begin)
        g = orders[order, place].group
        if _distance(snapshot, g, request.variant) == distance:
            count = _add(orders, g, count)
            found += 1
    return count


@compiled
def _add_first(orders: Records, begin: int, end: int, shelves: int, key: np.uint64, count: int) -> int:
    for order in range(ORDERS):
        last = min(end, begin + _part(FIRST[order], shelves))
        first, after = _equals(orders, order, begin, last, end)
        for place in range(begin, first):
            count = _add(orders, orders[order, place].group, count)
        since = _drawn(key, ORDERS + order, after - first)
        for i in range(last - first):
            count = _add(orders, orders[order, first + (since + i) % (after - first)].group, count)
    return count


@compiled
def _equals(orders: Records, order: int, begin: int, last: int, end: int) -> tuple[int, int]:
    """The places of all groups equal to the group before `last`: the first place, and the place after the
    last."""
    key, first = orders[order, orders[order, last - 1].group].key, last - 1
    while first > begin and orders[order, orders[order, first - 1].group].key == key:
        first -= 1
    low, high = last, end
    while low < high:
        middle = (low + high) // 2
        if orders[order, orders[order, middle].group].key == key:
            low = middle + 1
        else:
            high = middle
    return first, low


@compiled
def _drawn(key: np.uint64, what: int, count: int) -> int:
    """A number from 0 to `count` - 1, by the request's key; a different one for every `what`."""
    return int(pair(key, np.uint64(what)) % np.uint64(count))
