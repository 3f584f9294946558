"""llm-d-router's scorers of queue depth and KV cache, and `lora-load-state-scorer` (PR 2792, open), in equal
parts.

Sources: `scorer/loraloadstate/lora_load_state.go` of that pull request at 0bcc84e. The weights are the
default configuration's for queue and KV cache (2 each), and 2 for the new scorer, as in its README. The
scorer of prefixes is left out. The highest sum gets the request; ties are broken at random.

An adapter scores 1.0 where it is in a slot, 0.7 in the host's memory, 0.6 where a slot is free, 0.3 where a
slot holds an idle adapter, else 0.0. These scores are scaled by 0.94. The group of the highest hash gets 0.03
more, until the adapter is in a slot there; groups with free slots get up to 0.03 more, by their share of free
slots. A request for the base scores by the share of free slots. Pricing by measured loads
(`loadHorizonSeconds`) is off, as by default.

A snapshot counts the variants with requests, not the variants in slots. A slot is free here if there are
fewer variants with requests than slots, so "free" and "holds an idle adapter" are one tier. A loading variant
counts as absent, as in the router.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.engine_scores import cache_score, queue_score, queues, within_one
from controlplane.baselines.routing.parts.hashed_homes import highest_weight, weight
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import IN_HOST_MEMORY, IN_SLOT, Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled

SLOT, HOST, FREE, SATURATED = 1.0, 0.7, 0.6, 0.0
BONUS = 0.03
SCALE = 1.0 - 2 * BONUS


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    among = queues(snapshot)
    home = highest_weight(snapshot, request.variant)
    best, highest, tie = -1, 0.0, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            is_home = weight(request.variant, group.key) >= home
            score = queue_score(snapshot, g, among) + cache_score(snapshot, g)
            score += residency(snapshot, g, request, is_home)
            rank = pair(request.key, group.key)
            if best < 0 or score > highest or (score == highest and rank < tie):
                best, highest, tie = g, score, rank
    return best


@compiled
def residency(snapshot: Snapshot, g: int, request: Records, is_home: bool) -> float:
    free = free_slots(snapshot, g)
    if not request.variant:
        return SCALE * free
    where = snapshot.held[request.variant, g].where
    if where == IN_SLOT:
        return SCALE * SLOT + BONUS * free
    tier = HOST if where == IN_HOST_MEMORY else FREE if free > 0.0 else SATURATED
    return SCALE * tier + BONUS * free + (BONUS if is_home else 0.0)


@compiled
def free_slots(snapshot: Snapshot, g: int) -> float:
    """The share of a group's slots that are free."""
    group = snapshot.groups[g]
    slots = snapshot.models[group.model].slots
    if slots <= 0:
        return 0.0
    return within_one((slots - group.distinct) / slots)
