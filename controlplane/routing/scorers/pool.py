"""The cost of another pool than the request's own. `least_harm` uses one only to avoid a broken promise."""

from __future__ import annotations

from profiler.compiled import compiled

OTHER_POOL_S = 300.0


@compiled
def pool_s(is_other: bool) -> float:
    return OTHER_POOL_S if is_other else 0.0
