"""The cost of sending a request to a group: the sum of all scorers minus savings, in seconds; NOT_KNOWN_S if
it cannot be computed."""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from controlplane.routing.scorers.added_latency import added_latency_s
from controlplane.routing.scorers.cached_prefix import cached_prefix_s
from controlplane.routing.scorers.own_time import own_time_s
from controlplane.routing.scorers.pool import pool_s
from controlplane.routing.scorers.pressure import pressure_s
from controlplane.routing.scorers.promises import promises_s
from controlplane.routing.snapshot import Snapshot
from profiler.compiled import Records, compiled

NOT_KNOWN_S = 1e12


@compiled
def cost_s(snapshot: Snapshot, g: int, request: Records, of_group: Prospect, is_other_pool: bool) -> float:
    seconds = (
        own_time_s(request, of_group)
        + added_latency_s(request, of_group)
        + pressure_s(snapshot, g, request, of_group)
        + promises_s(request, of_group)
        + pool_s(is_other_pool)
        - cached_prefix_s(snapshot, g, request)
    )
    return seconds if -NOT_KNOWN_S < seconds < NOT_KNOWN_S else NOT_KNOWN_S
