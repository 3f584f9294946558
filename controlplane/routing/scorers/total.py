"""The cost of sending a request to a group: the sum of all scorers, in seconds. Savings are taken off."""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from controlplane.routing.scorers.added_latency import added_latency_s
from controlplane.routing.scorers.cached_prefix import cached_prefix_s
from controlplane.routing.scorers.own_time import own_time_s
from controlplane.routing.scorers.pool import pool_s
from controlplane.routing.scorers.promises import promises_s
from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled


@compiled
def cost_s(snapshot: Snapshot, g: int, request: Records, of_group: Prospect, is_other_pool: bool) -> float:
    return (
        own_time_s(request, of_group)
        + added_latency_s(request, of_group)
        + promises_s(request, of_group)
        + pool_s(is_other_pool)
        - cached_prefix_s(snapshot, g, request)
    )
