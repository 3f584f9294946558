"""What happens every few seconds: rates are renewed, and what the policy places is placed anew. Compiled."""

from __future__ import annotations

from controlplane.routing.orders import put_all
from controlplane.routing.placements import by_rank, demand, rank_pools
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import compiled

_renew, _rank_pools, _by_rank = demand.tick, rank_pools.place, by_rank.place
# Their numbers in `controlplane.routing.policies.choose.POLICIES`.
OURS, LORASERVE_LIKE = 0, 11


@compiled
def tick(snapshot: Snapshot, state: RouterState, policy: int, now_s: float) -> None:
    _renew(state, now_s)
    if policy == OURS:
        _rank_pools(snapshot, state)
        put_all(snapshot)
    elif policy == LORASERVE_LIKE:
        _by_rank(snapshot, state)
