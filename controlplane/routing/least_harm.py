"""Our policy: the group where a request costs least, including its cost for the requests there.

CaraServe's Algorithm 1 (section 5) sums what a request adds to the steps of others, and a penalty for broken
promises. Here this sum covers every kind of variant, through what its rows and weights add to a step. It also
includes the wait until a variant is loaded and until a row and KV cache are free, and the request's own
promises of TTFT and TPOT. If kernels pad, groups have ceilings
(`controlplane.routing.placements.rank_pools`). A request leaves the groups of its pool only if each of them
would break a promise and another group would not.

The policy considers all of up to LOOK_AT_ALL groups, and some of more (`controlplane.routing.candidates`).
"""

from __future__ import annotations

import math

from controlplane.routing.candidates import candidate, gather
from controlplane.routing.chance import pair
from controlplane.routing.orders import (
    NOT_ORDERED,
    UNUSABLE,
    ceiling_of,
    keeps_orders,
    model_of,
    order_all,
    shelf_at,
    shelf_end,
)
from controlplane.routing.prospect import prospect
from controlplane.routing.scorers.promises import PENALTY_S
from controlplane.routing.scorers.total import cost_s
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled

_NO_CEILING = 1000


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    if not keeps_orders(snapshot):
        return _pick(snapshot, request)
    if snapshot.orders[0, 0].shelf == NOT_ORDERED:
        order_all(snapshot)
    g = _pick(snapshot, request)
    if g < 0:  # no group is usable, or groups changed without notice
        order_all(snapshot)
        g = _pick(snapshot, request)
    return g


@compiled
def _pick(snapshot: Snapshot, request: Records) -> int:
    """The candidate where the request costs least. Groups of other pools are considered only if the best of
    the own pool costs PENALTY_S or more."""
    wanted = pool_of(snapshot, request)
    own, own_s = _cheapest(snapshot, request, wanted, True)
    if own >= 0 and own_s < PENALTY_S:
        return own
    other, other_s = _cheapest(snapshot, request, wanted, False)
    return other if own < 0 or other_s < own_s else own


@compiled
def _cheapest(snapshot: Snapshot, request: Records, ceiling: int, in_pool: bool) -> tuple[int, float]:
    """The group where the request costs least, and the cost: among the candidates in the pool with that
    ceiling, or in all others. Among equals the lowest hash wins, so the order of groups does not matter."""
    best, least_s, tie = -1, math.inf, pair(request.key, request.key)
    for number in range(gather(snapshot, request, ceiling, in_pool)):
        g = candidate(snapshot, number)
        group = snapshot.groups[g]
        if group.usable and (group.ceiling == ceiling) == in_pool:
            seconds = cost_s(snapshot, g, request, prospect(snapshot, g, request), not in_pool)
            if best < 0 or seconds <= least_s:
                rank = pair(request.key, group.key)
                if best < 0 or seconds < least_s or rank < tie:
                    best, least_s, tie = g, seconds, rank
    return best, least_s


@compiled
def pool_of(snapshot: Snapshot, request: Records) -> int:
    """The lowest ceiling that has room for the request's rank; the highest ceiling if none has room."""
    wanted, highest = _NO_CEILING, -1
    if keeps_orders(snapshot):
        place, shelf = 0, shelf_at(snapshot.orders, 0)
        while shelf != UNUSABLE:
            ceiling = ceiling_of(shelf)
            if ceiling >= snapshot.variants[model_of(shelf), request.variant].rank_class:
                wanted = min(wanted, ceiling)
            highest = max(highest, ceiling)
            place = shelf_end(snapshot.orders, place)
            shelf = shelf_at(snapshot.orders, place)
    else:
        for g in range(len(snapshot.groups)):
            group = snapshot.groups[g]
            if group.usable:
                if group.ceiling >= snapshot.variants[group.model, request.variant].rank_class:
                    wanted = min(wanted, group.ceiling)
                highest = max(highest, group.ceiling)
    return wanted if wanted < _NO_CEILING else highest
