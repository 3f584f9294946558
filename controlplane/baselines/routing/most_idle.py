"""The group with the fewest requests (CaraServe's "MostIdle"; a gateway's least outstanding requests)."""

from __future__ import annotations

from controlplane.routing.chance import pair
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    best, least, tie = -1, 0, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            rank = pair(request.key, group.key)
            if best < 0 or group.batch.rows < least or (group.batch.rows == least and rank < tie):
                best, least, tie = g, group.batch.rows, rank
    return best
