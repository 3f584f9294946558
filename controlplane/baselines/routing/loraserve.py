"""LoRAServe-like routing: to the least busy of a variant's homes (`controlplane.baselines.routing.by_rank`).

LoRAServe (arXiv 2511.22880) places adapters by rank and demand, moves them as demand drifts, and reads an
adapter from another GPU's memory where it is not placed. This policy follows its abstract, because its
algorithm could not be read. The least busy group has the fewest requests. A variant without a usable home,
and the base, go to any group.
"""

from __future__ import annotations

from controlplane.baselines.routing import most_idle
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import MAX_HOMES, RouterState
from profiler.compiled import Records, compiled

_most_idle = most_idle.pick


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    home = state.homes[request.variant]
    best, fewest, tie = -1, 0, pair(request.key, request.key)
    for place in range(min(home.count, MAX_HOMES)):
        g = home.groups[place]
        if 0 <= g < len(snapshot.groups) and snapshot.groups[g].usable:
            group = snapshot.groups[g]
            rank = pair(request.key, group.key)
            if best < 0 or group.batch.rows < fewest or (group.batch.rows == fewest and rank < tie):
                best, fewest, tie = g, group.batch.rows, rank
    return best if best >= 0 else _most_idle(snapshot, request, state)
