"""A penalty for promises that would be broken, the request's own and those of others, by how far.

A promise that is exceeded by a quarter weighs as much as PENALTY_S seconds: more than any other cost among
groups that work, so broken promises decide first. (CaraServe's penalty is a constant. With one the group
where all is broken already is the cheapest: nothing can be lost there any more. All that comes would be sent
to it, though predictions err, what is late only a little may still be in time, and requests that are sent
there wait without end.)
"""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from profiler.compiled import Records, compiled

PENALTY_S = 1000.0
EXCESS = 0.25


@compiled
def promises_s(request: Records, of_group: Prospect) -> float:
    return PENALTY_S / EXCESS * (of_group.excess + of_group.own_excess)
