"""Ray Serve's model multiplexing (`MultiplexMixin.apply_multiplex_routing`, Ray 2.60), as Ray Serve LLM uses
it for adapters.

It makes the power of two choices among the replicas that have the model. If there are none, or both drawn
replicas are full, it chooses among the replicas with the fewest models; then among all. A request for the
base chooses between two of all replicas.

- A group has a variant that is in a slot or loading. Ray learns of it a moment later, and waits up to two
  seconds for a full replica that has the model before it continues.
- The models of a group are the variants with requests there: a snapshot does not contain its idle variants.
- Full: no row is free (Ray Serve LLM's default of 1e9 requests would leave a model on one replica for ever).
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.two import Two, draw, fewer_requests, no_groups, with_candidate
from controlplane.routing.snapshot import LOADING, Snapshot
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    drawn, all_of_them, taking = draw(state.chance), no_groups(), no_groups()
    having, few, fewest = no_groups(), no_groups(), -1
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if not group.usable:
            continue
        all_of_them = with_candidate(all_of_them, g, drawn, group.key)
        if group.batch.rows >= snapshot.models[group.model].max_rows:
            continue
        taking = with_candidate(taking, g, drawn, group.key)
        if request.variant and snapshot.held[request.variant, g].where >= LOADING:
            having = with_candidate(having, g, drawn, group.key)
        if fewest < 0 or group.distinct < fewest:
            few, fewest = no_groups(), max(0, group.distinct)
        if group.distinct <= fewest:
            few = with_candidate(few, g, drawn, group.key)
    return fewer_requests(snapshot, _first(request.variant > 0, having, few, taking, all_of_them))


@compiled
def _first(is_variant: bool, having: Two, few: Two, taking: Two, all_of_them: Two) -> Two:
    """The first of these that has a candidate."""
    if is_variant and having.first >= 0:
        return having
    if is_variant and few.first >= 0:
        return few
    return taking if taking.first >= 0 else all_of_them
