"""Dynamo's placement of LoRAs by rendezvous hashing with a replica factor (PR 5992, merged).

Source: `lib/llm/src/lora/routing/hrw.rs` and, for the factor, `controller.rs` (PR 8180) of
github.com/ai-dynamo/dynamo. A LoRA's replicas are the workers where its hash is highest. Their number is the
LoRA's share of the requests in flight times the number of all slots, at least one. The least busy replica
gets the request.

- The factor follows every request; Dynamo's is updated every 3 s, smoothed, and decreases late. Dynamo
  normalises the factors so that all replicas fill the slots. Here they are rounded down, which stays within
  the slots without reading the other LoRAs.
- Dynamo skips workers whose slots are full, and prefers workers of the set that have loaded the LoRA already,
  so that a hot LoRA does not leave its first worker. Both are left out.
- The least busy replica has the fewest requests (Dynamo: round robin, or by KV cache and prefix). The base
  goes to any group.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.hashed_homes import least_weight, usable_groups, weight
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    least = least_weight(snapshot, request.variant, replicas(snapshot, request)) if request.variant else 0.0
    best, fewest, tie = -1, 0, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable and (not request.variant or weight(request.variant, group.key) >= least):
            rank = pair(request.key, group.key)
            if best < 0 or group.batch.rows < fewest or (group.batch.rows == fewest and rank < tie):
                best, fewest, tie = g, group.batch.rows, rank
    return best


@compiled
def replicas(snapshot: Snapshot, request: Records) -> int:
    """The number of groups that a request's variant may use."""
    own, of_all, slots = 0.0, 0.0, 0.0
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            own += max(0, snapshot.held[request.variant, g].rows)
            of_all += max(0, group.batch.rows - snapshot.held[0, g].rows)
            slots += max(0, snapshot.models[group.model].slots)
    share = min(1.0, own / of_all) if of_all > 0.0 else 0.0
    return max(1, min(usable_groups(snapshot), int(min(share * slots, 1e9))))
