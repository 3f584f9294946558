"""The work of every few seconds: rates are updated, and pools of groups are formed again. Compiled."""

from __future__ import annotations

from controlplane.routing.orders import put_all
from controlplane.routing.placements import demand, rank_pools
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import compiled

_renew, _rank_pools = demand.tick, rank_pools.place


@compiled
def tick(snapshot: Snapshot, state: RouterState, now_s: float) -> None:
    _renew(state, now_s)
    _rank_pools(snapshot, state)
    put_all(snapshot)
