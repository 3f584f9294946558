"""Any usable group, all equally likely (CaraServe's "Random")."""

from __future__ import annotations

from controlplane.baselines.routing.parts.two import draw, no_groups, with_candidate
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    drawn, two = draw(state.chance), no_groups()
    for g in range(len(snapshot.groups)):
        if snapshot.groups[g].usable:
            two = with_candidate(two, g, drawn, snapshot.groups[g].key)
    return two.first
