"""What happens every few seconds: rates are renewed, and what the policy places is placed anew. Compiled."""

from __future__ import annotations

from controlplane.routing.placements import demand, rank_pools
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import compiled

_renew, _rank_pools = demand.tick, rank_pools.place
OURS = 0


@compiled
def tick(snapshot: Snapshot, state: RouterState, policy: int, now_s: float) -> None:
    _renew(state, now_s)
    if policy == OURS:
        _rank_pools(snapshot, state)
