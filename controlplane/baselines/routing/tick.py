"""The work of every few seconds: only the policy that gateways run has some
(`controlplane.routing.placements.tick`). Compiled."""

from __future__ import annotations

from controlplane.baselines.routing.choose import POLICIES
from controlplane.routing.placements import tick as production
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import compiled

_production = production.tick
OURS = POLICIES.index("least-harm")


@compiled
def tick(snapshot: Snapshot, state: RouterState, policy: int, now_s: float) -> None:
    if policy == OURS:
        _production(snapshot, state, now_s)
