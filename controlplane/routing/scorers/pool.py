"""What another pool than the request's own costs. `least_harm` goes there only to spare a broken promise."""

from __future__ import annotations

from profiler.compiled import compiled

OTHER_POOL_S = 300.0


@compiled
def pool_s(is_other: bool) -> float:
    return OTHER_POOL_S if is_other else 0.0
