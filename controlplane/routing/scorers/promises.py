"""A penalty for promises that would be broken, the request's own and other requests', by how far.

A promise that is exceeded by a quarter weighs PENALTY_S seconds: more than any other cost among working
groups, so broken promises decide first. (CaraServe's penalty is a constant. Then a group that breaks every
promise is the cheapest, because nothing more can be lost there, and all new requests would be sent to it. But
predictions have errors, requests that are predicted slightly late may still be in time, and requests in such
a group wait without end.)
"""

from __future__ import annotations

from controlplane.routing.prospect import Prospect
from profiler.compiled import Records, compiled

PENALTY_S = 1000.0
EXCESS = 0.25


@compiled
def promises_s(request: Records, of_group: Prospect) -> float:
    return PENALTY_S / EXCESS * (of_group.excess + of_group.own_excess)
