"""Another pool than the request's own costs less than a broken promise, and more than anything else."""

from __future__ import annotations

from profiler.compiled import compiled

OTHER_POOL_S = 300.0


@compiled
def pool_s(is_other: bool) -> float:
    return OTHER_POOL_S if is_other else 0.0
