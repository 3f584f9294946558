"""llm-d-router's shuffle sharding of LoRA adapters (PR 720, an experiment, closed), with its scorers of queue
and KV cache.

Source: `pkg/plugins/scorer/lora_aware.go` at cfc42c4 of github.com/llm-d/llm-d-router. Each adapter has a
shard of the endpoints, drawn by its hash: all of up to 3, three quarters of 4 to 7, two thirds of 8 and more
(rounded up). Its scorer gives 1 inside and 0 outside, and 0.5 everywhere for the base. The pull request names
no weights, so all scorers have the default weight of 1. The highest sum gets the request; ties are broken at
random.

There a shard is the beginning of a seeded shuffle, and is kept from an adapter's first request on. Here a
shard is the groups of the highest hashes, drawn as evenly, which changes least when groups come and go.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.engine_scores import cache_score, queue_score, queues
from controlplane.baselines.routing.parts.hashed_homes import least_weight, usable_groups, weight
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    among = queues(snapshot)
    least = least_weight(snapshot, request.variant, shard_size(usable_groups(snapshot)))
    best, highest, tie = -1, 0.0, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            inside = not request.variant or weight(request.variant, group.key) >= least
            score = queue_score(snapshot, g, among) + cache_score(snapshot, g) + (1.0 if inside else 0.0)
            rank = pair(request.key, group.key)
            if best < 0 or score > highest or (score == highest and rank < tie):
                best, highest, tie = g, score, rank
    return best


@compiled
def shard_size(groups: int) -> int:
    if groups <= 3:
        return groups
    return (groups * 3 + 3) // 4 if groups <= 7 else (groups * 2 + 2) // 3
