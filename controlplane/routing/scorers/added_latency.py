"""How much longer all others there take for it: each has half of an output to come, on average.

CaraServe, Algorithm 1: the added decode time of every running request. The prefill counts too, for it stops
the others for as long as it takes.
"""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from profiler.compiled import Records, compiled


@compiled
def added_latency_s(request: Records, of_group: Prospect) -> float:
    return of_group.rows * of_group.added_tpot_s * request.output / 2  # type: ignore[no-any-return]
