"""Ray Serve's power of two choices (`PowerOfTwoChoicesRequestRouter`, Ray 2.60).

Among two random replicas the one with the shorter queue gets the request, if it takes another request
(`max_ongoing_requests`; here: a row is free, because Ray Serve LLM's default of 1e9 never refuses). Ray draws
again, after a pause, until a replica takes the request. Here two are drawn among the replicas with a free
row, or among all if no row is free. Ray's first preference, replicas on the same node, is left out.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.two import draw, fewer_requests, no_groups, with_candidate
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    drawn, taking, all_of_them = draw(state.chance), no_groups(), no_groups()
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            all_of_them = with_candidate(all_of_them, g, drawn, group.key)
            if group.batch.rows < snapshot.models[group.model].max_rows:
                taking = with_candidate(taking, g, drawn, group.key)
    return fewer_requests(snapshot, taking if taking.first >= 0 else all_of_them)
