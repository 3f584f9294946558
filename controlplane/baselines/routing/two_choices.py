"""Ray Serve's power of two choices (`PowerOfTwoChoicesRequestRouter`, Ray 2.60).

Of two replicas at random the one with the shorter queue gets the request, if it takes any more
(`max_ongoing_requests`; here: a row is free, for Ray Serve LLM's default of 1e9 never refuses). Ray draws
again, after a pause, until one takes it; here two are drawn of those that do, or of all if none does. Its
choice of replicas on the same node first is left out.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.two import draw, fewer_requests, nobody, with_candidate
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    drawn, taking, all_of_them = draw(state.chance), nobody(), nobody()
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            all_of_them = with_candidate(all_of_them, g, drawn, group.key)
            if group.batch.rows < snapshot.models[group.model].max_rows:
                taking = with_candidate(taking, g, drawn, group.key)
    return fewer_requests(snapshot, taking if taking.first >= 0 else all_of_them)
