"""llm-d-router's scorers of an engine's load: its queue, and its KV cache. Compiled.

Sources: `scorer/queuedepth/queue.go` and `scorer/kvcacheutilization/kvcache_utilization.go`, under
`pkg/epp/framework/plugins/scheduling` of github.com/llm-d/llm-d-router. Each scorer gives 0 to 1, the best 1.
There the engine reports its waiting requests; here they are computed from the sent requests.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from controlplane.routing.snapshot import Snapshot
from profiler.compiled import compiled


class Queues(NamedTuple):
    """The shortest and the longest queue of usable groups, in requests."""

    shortest: float
    longest: float


@compiled
def waiting(snapshot: Snapshot, g: int) -> float:
    """The number of a group's requests that its engine would report as waiting: for a row, for KV cache,
    for a slot of their variant, or for the next step that takes their prompt. The largest of these numbers
    counts."""
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    rows = float(group.batch.rows)
    each = max(1.0, group.batch.context / max(1.0, rows))  # tokens of a request
    over = rows - model.max_rows
    over = max(over, (group.batch.context - model.kv_tokens) / each)
    over = max(over, (group.unfilled - model.batched_tokens) / each)
    if group.distinct > model.slots:
        over = max(over, rows * (group.distinct - model.slots) / group.distinct)
    return math.ceil(over) * 1.0 if 0.0 < over < 1e15 else 0.0


@compiled
def queues(snapshot: Snapshot) -> Queues:
    shortest, longest = math.inf, 0.0
    for g in range(len(snapshot.groups)):
        if snapshot.groups[g].usable:
            count = waiting(snapshot, g)
            shortest, longest = min(shortest, count), max(longest, count)
    return Queues(shortest, longest)


@compiled
def queue_score(snapshot: Snapshot, g: int, among: Queues) -> float:
    """1 for the shortest queue, 0 for the longest; 1 for all where they are equal."""
    if among.longest <= among.shortest:
        return 1.0
    return (among.longest - waiting(snapshot, g)) / (among.longest - among.shortest)


@compiled
def cache_score(snapshot: Snapshot, g: int) -> float:
    """The free share of the KV cache."""
    group = snapshot.groups[g]
    return within_one(1.0 - group.batch.context / snapshot.models[group.model].kv_tokens)


@compiled
def within_one(score: float) -> float:
    """The score, bounded to 0 to 1; NaN counts as 0."""
    return min(score, 1.0) if score > 0.0 else 0.0
