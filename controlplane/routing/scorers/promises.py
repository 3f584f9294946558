"""A penalty for each promise that would be broken, the request's own and those of others.

A broken promise weighs as much as PENALTY_S seconds: more than any other cost among groups that work, so the
number of broken promises decides first (CaraServe's penalty is a constant, too).
"""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from profiler.compiled import Records, compiled

PENALTY_S = 1000.0


@compiled
def promises_s(request: Records, of_group: Prospect) -> float:
    return PENALTY_S * (of_group.broken + (1 if of_group.breaks_own else 0))
