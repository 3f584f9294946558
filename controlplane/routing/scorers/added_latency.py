"""How much longer all other requests of the group take: on average each still has half of its output to come.

CaraServe, Algorithm 1: the added decode time of every running request. The prefill is included, because it
stops the others.
"""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from profiler.compiled import Records, compiled


@compiled
def added_latency_s(request: Records, of_group: Prospect) -> float:
    return of_group.rows * of_group.added_tpot_s * request.output / 2  # type: ignore[no-any-return]
