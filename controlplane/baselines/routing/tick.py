"""The work that each policy does every few seconds. The policy that gateways run has production's tick
(`controlplane.routing.placements.tick`). Compiled."""

from __future__ import annotations

from controlplane.baselines.routing import by_rank
from controlplane.baselines.routing.choose import POLICIES
from controlplane.routing.placements import demand
from controlplane.routing.placements import tick as production
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import compiled

_production, _renew, _by_rank = production.tick, demand.tick, by_rank.place
OURS, LORASERVE_LIKE = POLICIES.index("least-harm"), POLICIES.index("loraserve-like")


@compiled
def tick(snapshot: Snapshot, state: RouterState, policy: int, now_s: float) -> None:
    if policy == OURS:
        _production(snapshot, state, now_s)
        return
    _renew(state, now_s)
    if policy == LORASERVE_LIKE:
        _by_rank(snapshot, state)
