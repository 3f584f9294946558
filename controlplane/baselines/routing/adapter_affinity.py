"""llm-d-router's scorers of queue depth, KV cache and LoRA affinity, each of weight 1.

Sources: `scorer/loraaffinity/lora_affinity.go` at ebab687 of github.com/llm-d/llm-d-router, as corrected in
PR 2625 (the adapters of an endpoint are counted once). The weights are the default of a scorer without a
weight (`DefaultScorerWeight`), in the set of `test/integration/epp/testdata/default-config.yaml` without its
scorer of prefixes. The highest sum gets the request; ties are broken at random (`max-score-picker`).

An adapter is active where it has any request: its name is in `vllm:lora_requests_info`. Affinity is 1.0 where
it is active, 0.8 where it is not and fewer adapters are active than there are slots, else 0.0. (The router's
0.6, for adapters that only wait, never occurs: vLLM lists waiting adapters as active.) The base is never
active.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.engine_scores import cache_score, queue_score, queues
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled

ACTIVE, CAPACITY, FULL = 1.0, 0.8, 0.0


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    among = queues(snapshot)
    best, highest, tie = -1, 0.0, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable:
            score = queue_score(snapshot, g, among) + cache_score(snapshot, g)
            score += affinity(snapshot, g, request)
            rank = pair(request.key, group.key)
            if best < 0 or score > highest or (score == highest and rank < tie):
                best, highest, tie = g, score, rank
    return best


@compiled
def affinity(snapshot: Snapshot, g: int, request: Records) -> float:
    group = snapshot.groups[g]
    if request.variant and snapshot.held[request.variant, g].rows > 0:
        return ACTIVE
    return CAPACITY if group.distinct < snapshot.models[group.model].slots else FULL
