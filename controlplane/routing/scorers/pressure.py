"""What a request takes of a group from later requests: the fuller a group is, the more its last rows, KV
cache, slots and time between tokens are worth.

Every resource of a group has a potential that grows exponentially with its used share, and a request costs
what it adds to their sum. Routing by such costs keeps the fullest resource within a logarithmic factor of the
best possible with knowledge of the future, whatever the requests need (Aspnes, Azar, Fiat, Plotkin and
Waarts, JACM 1997).

A slot is held while any row uses its variant. So a request next to n others of its variant extends that time
by one part in n + 1. So variants gather in few groups if slots are scarce, and spread if they are not.
"""

from __future__ import annotations

import math

from controlplane.routing.prospect import MARGIN, Prospect
from controlplane.routing.snapshot import Snapshot, promised_s
from profiler.compiled import Records, compiled
from profiler.step_time.steps import decode_curve_s

# The potential of a fully used resource, in seconds; it falls by a factor of e for each sixth that is free.
# Found by simulation (benchmarks/routing). Beyond full use it continues in a straight line: a group that
# already has too much must never be the group where more costs least.
FULL_S = 300.0
STEEPNESS = 6.0
LEAST_LEFT = 0.1  # of one row's time: counts as left of a promise if nothing is


@compiled
def pressure_s(snapshot: Snapshot, g: int, request: Records, of_group: Prospect) -> float:
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    batch = group.batch
    tokens, context = request.prompt + request.output, group.stretch * batch.context
    added = rise(batch.rows / model.max_rows, (batch.rows + 1) / model.max_rows)
    added += rise(context / model.kv_tokens, (context + tokens) / model.kv_tokens)
    if request.variant:
        added += slot_rise(model, group.distinct, max(0, snapshot.held[request.variant, g].rows))
    least_s = group.correction * decode_curve_s(model, 1)
    before_s, after_s = promised_s(group.tightest), min(promised_s(group.tightest), request.tpot_s)
    tpot_s = max(of_group.tpot_s, group.tpot_s + of_group.added_tpot_s)
    added += rise(share(group.tpot_s, before_s, least_s), share(tpot_s, after_s, least_s))
    return FULL_S * added


@compiled
def slot_rise(model: Records, distinct: int, rows: int) -> float:
    """The rise for a request in a group with `distinct` variants, and `rows` of the request's own variant."""
    after = distinct + (1 if rows == 0 else 0)
    return rise((after - 1) / model.slots, after / model.slots) / (rows + 1)


@compiled
def slot_s(model: Records, distinct: int, rows: int) -> float:
    """`slot_rise` in seconds."""
    return FULL_S * slot_rise(model, distinct, rows)


@compiled
def share(tpot_s: float, promise_s: float, least_s: float) -> float:
    """The used share of the time between tokens that a promise leaves in addition to a single row's time."""
    if tpot_s <= least_s:
        return 0.0
    left_s = max(MARGIN * promise_s - least_s, LEAST_LEFT * least_s)
    return (tpot_s - least_s) / left_s if left_s > 0.0 else 0.0


@compiled
def rise(before: float, after: float) -> float:
    """The rise of the potential of one resource between two used shares."""
    return potential(after) - potential(before)


@compiled
def potential(taken: float) -> float:
    if taken > 1.0:
        return 1.0 + STEEPNESS * (taken - 1.0)
    return math.exp(STEEPNESS * (taken - 1.0))
