"""CaraServe's rank-aware scheduling (Toppings, ATC '25; arXiv 2401.11240, section 5, Algorithm 1).

Among the servers with memory for the request, it takes the server with the lowest cost. The cost is the
latency that the request adds to the requests that run there: its prefill once, and its part of a decode step
for every token of an average response. A large penalty is added if the step would be longer than the SLO on
time per token.

- The performance model is ours: it knows ranks, padded or not, bytes of deltas and BOFT, KV length. The
  paper's model is linear in the sum of the ranks, or in their maximum times their count.
- The average response is the request's expected one. The paper has one SLO for all; here it is the tightest
  of the group's and the request's own.
- The paper takes servers that have the adapter; here every group may fetch it. As in the paper, the cost
  ignores loads, TTFT and pools.
- Where no group has room, all groups are candidates, because there is no queue before the groups. Ties: at
  random.
"""

from __future__ import annotations

import math

from controlplane.baselines.routing.parts.room import any_room, has_room
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import NO_PROMISE, Snapshot, promised_s
from controlplane.routing.starts import context_of
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled
from profiler.step_time.records import PREFILL_KNOTS
from profiler.step_time.steps import prefill_curve_s, step_with_one_more_s

PENALTY_S = 1e6
_MANY = 1 << 20  # a batch with more rows is invalid


@compiled
def pick(snapshot: Snapshot, request: Records, state: RouterState) -> int:
    room = any_room(snapshot, request)
    best, least_s, tie = -1, math.inf, pair(request.key, request.key)
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.usable and (not room or has_room(snapshot, g, request)):
            seconds = cost_s(snapshot, g, request)
            rank = pair(request.key, group.key)
            if best < 0 or seconds < least_s or (seconds == least_s and rank < tie):
                best, least_s, tie = g, seconds, rank
    return best


@compiled
def cost_s(snapshot: Snapshot, g: int, request: Records) -> float:
    """The cost of a request in a group, s; infinite if it cannot be computed."""
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    if group.batch.rows < 0 or group.batch.rows > _MANY:
        return math.inf
    variant = snapshot.variants[group.model, request.variant]
    is_first = snapshot.held[request.variant, g].rows == 0
    step_s = step_with_one_more_s(model, group.batch, variant, context_of(request), is_first)
    step_s *= group.correction
    decode_s = max(0.0, step_s - group.step_s) * request.output
    seconds = group.batch.rows * (prefill_s(snapshot, g, request) + decode_s)
    if step_s > min(request.tpot_s, tightest_s(group)):
        seconds += PENALTY_S
    return seconds if -math.inf < seconds < math.inf else math.inf


@compiled
def prefill_s(snapshot: Snapshot, g: int, request: Records) -> float:
    """The time of the steps that prefill the request's prompt, s."""
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    if not (0.0 < request.prompt < 1e12 and model.batched_tokens > 0 and model.prefill_grain > 0.0):
        return 0.0
    steps = math.ceil(request.prompt / model.batched_tokens)
    each = min(request.prompt / steps, model.prefill_grain * PREFILL_KNOTS)
    token_s = snapshot.variants[group.model, request.variant].token_s
    return group.correction * (steps * prefill_curve_s(model, each) + request.prompt * token_s)  # type: ignore[no-any-return]


@compiled
def tightest_s(group: Records) -> float:
    return promised_s(group.tightest) if 0 <= group.tightest < NO_PROMISE else math.inf
