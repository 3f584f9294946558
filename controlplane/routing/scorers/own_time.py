"""The request's own time in the group: to its first token, and for the rest of its output."""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from profiler.compiled import Records, compiled


@compiled
def own_time_s(request: Records, of_group: Prospect) -> float:
    return of_group.ttft_s + of_group.tpot_s * request.output  # type: ignore[no-any-return]
