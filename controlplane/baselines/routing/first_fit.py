"""Punica's placement (MLSys '24, section 5.1; CaraServe's "FirstFit"): it packs requests together.

A request goes to the GPU with the most requests that still has a row and memory for its KV cache. If several
qualify, it goes to the GPU with the highest identifier (here: key). Groups stay empty, and can be released,
until they are needed.

Punica queues a request that fits nowhere, and moves requests away from GPUs with few requests. Here such a
request goes to the group with the fewest requests, and no request moves. A row is one of the engine's
`max_rows` (Punica: 32).
"""

from __future__ import annotations

from controlplane.baselines.routing import most_idle
from controlplane.baselines.routing.parts.room import has_room
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled

_most_idle = most_idle.pick


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    best = -1
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable and has_room(snapshot, g, request):
            more = best < 0 or group.batch.rows > snapshot.groups[best].batch.rows
            equal = best >= 0 and group.batch.rows == snapshot.groups[best].batch.rows
            if more or (equal and group.key > snapshot.groups[best].key):
                best = g
    return best if best >= 0 else _most_idle(snapshot, request, state)
