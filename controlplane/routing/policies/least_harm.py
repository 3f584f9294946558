"""Ours: where a request costs least, counting what it costs those who run there.

CaraServe's Algorithm 1 (section 5) adds up what a request adds to the steps of others and a penalty for
broken promises. Here that goes for every kind of variant, through what its rows and its weights add to a
step; for the wait until a variant is loaded, until a row and KV cache are free; and for the request's own
promises of TTFT and TPOT. Where kernels pad, groups have ceilings
(`controlplane.routing.placements.rank_pools`): a request leaves the groups of its pool only if each of those
would break a promise and another one would not.
"""

from __future__ import annotations

import math

from controlplane.routing.chance import pair
from controlplane.routing.prospect import prospect
from controlplane.routing.scorers.promises import PENALTY_S
from controlplane.routing.scorers.total import cost_s
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    wanted = pool_of(snapshot, request)
    own, own_s = _cheapest(snapshot, request, wanted, True)
    if own >= 0 and own_s < PENALTY_S:
        return own
    other, other_s = _cheapest(snapshot, request, wanted, False)
    return other if own < 0 or other_s < own_s else own


@compiled
def _cheapest(snapshot: Snapshot, request: Records, ceiling: int, in_pool: bool) -> tuple[int, float]:
    """The group where the request costs least, of those in the pool with that ceiling, or of all others; and
    the cost. Of equals the one with the lowest hash, so the order of groups does not matter."""
    best, least_s, tie = -1, math.inf, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
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
    """The lowest ceiling that has room for the request's rank; of the highest there is, if none has."""
    wanted, highest = 1000, -1
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            rank_class = snapshot.variants[group.model, request.variant].rank_class
            if group.ceiling >= rank_class:
                wanted = min(wanted, group.ceiling)
            highest = max(highest, group.ceiling)
    return wanted if wanted < 1000 else highest
