"""The predicted effects of sending a request to a group. Compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

from controlplane.routing.snapshot import (
    ELSEWHERE,
    IN_HOST_MEMORY,
    LOADING,
    NO_PROMISE,
    SHORTEST_PROMISE_S,
    Snapshot,
    promised_s,
)
from controlplane.routing.starts import context_of, prompt_s, spread_s, starts_s
from profiler.compiled import Records, compiled
from profiler.step_time.steps import prefill_curve_s, step_with_one_more_s

FAR = 10.0  # widths or deviations; a spread is cut off there
LEAST_SPREAD = 0.05  # of a promise: predictions err
LOGISTIC = 1.7  # a logistic curve of width 1 / 1.7 is near a normal one of deviation 1
LEAST_TTFT_S = 1e-3  # shorter promises count as this
MARGIN = 0.93  # a promise counts as kept up to this share of it: predictions have errors of a few percent


class Prospect(NamedTuple):
    """Seconds. `ttft_s`: from now to the request's first token. `step_s`: a step with the request. `added_s`:
    how much longer that is than without it. `tpot_s` and `added_tpot_s`: the same including prefills between
    steps. `excess`: how much more the rows of the batch would exceed their promised TPOT with the request
    than without it, as shares of these promises, summed. `own_excess`: the excess of its own TPOT and TTFT.
    `rows`: the rows with which it would share steps."""

    ttft_s: float
    step_s: float
    added_s: float
    excess: float
    own_excess: float
    rows: int
    tpot_s: float
    added_tpot_s: float


@compiled
def prospect(snapshot: Snapshot, g: int, request: Records) -> Prospect:
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    variant = snapshot.variants[group.model, request.variant]
    held = snapshot.held[request.variant, g]
    is_first = held.rows == 0
    step_s = group.correction * step_with_one_more_s(
        model, group.batch, variant, context_of(request), is_first
    )
    ttft_s = first_token_s(snapshot, g, request, step_s)
    rows, output = group.batch.rows + 1, max(1.0, request.output)
    own_s = step_s + group.correction * starts_s(
        model, rows, group.starts, group.start_tokens, group.start_s
    )  # its own prefill comes before it decodes, so only the others' TPOT includes it
    others_s = step_s + group.correction * starts_s(
        model,
        rows,
        group.starts + 1.0 / output,
        group.start_tokens + request.prompt / output,
        group.start_s + prompt_s(snapshot, g, request) / output,
    )
    own_spread_s = group.correction * spread_s(model, rows, group.starts, group.start_tokens, output)
    excess = added_excess(model, group, request, others_s)
    own_excess = excess_of(own_s, own_spread_s, max(request.tpot_s, SHORTEST_PROMISE_S))
    own_excess += max(0.0, (request.waited_s + ttft_s) / max(request.ttft_s, LEAST_TTFT_S) - 1.0)
    added_s = max(0.0, step_s - group.step_s)
    return Prospect(
        ttft_s,
        step_s,
        added_s,
        excess,
        own_excess,
        group.batch.rows,
        own_s,
        max(0.0, others_s - group.tpot_s),
    )


@compiled
def first_token_s(snapshot: Snapshot, g: int, request: Records, step_s: float) -> float:
    """The time to the first token. Earlier prompts are filled first; then its own, when it has room and its
    variant is loaded."""
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    variant = snapshot.variants[group.model, request.variant]
    held = snapshot.held[request.variant, g]
    tokens = group.unfilled + request.prompt
    steps = math.ceil(tokens / model.batched_tokens)
    prefill_s = steps * prefill_curve_s(model, tokens / steps) + request.prompt * variant.token_s
    wait_s = group.step_s / 2 + places_s(group, model, request, step_s)
    if request.variant and held.where <= LOADING:
        wait_s = max(wait_s, load_s(variant, held.where))
        if held.rows == 0 and group.distinct >= model.slots:
            wait_s += request.output * step_s / 2  # until a variant in a slot has no requests left
    return wait_s + group.correction * prefill_s + model.path_s  # type: ignore[no-any-return]


@compiled
def load_s(variant: Records, where: int) -> float:
    if where == ELSEWHERE:
        return variant.fetch_s + variant.load_s  # type: ignore[no-any-return]
    return variant.load_s if where == IN_HOST_MEMORY else variant.load_s / 2  # type: ignore[no-any-return]


@compiled
def places_s(group: Records, model: Records, request: Records, step_s: float) -> float:
    """The wait for a row, or for KV cache, that other requests hold: these end one after the other."""
    rows = max(0.0, group.batch.rows + 1.0 - model.max_rows)
    context = group.stretch * group.batch.context
    tokens = max(0.0, context + request.prompt + request.output - model.kv_tokens)
    each = max(1.0, context / max(1, group.batch.rows))
    running = max(1.0, min(group.batch.rows, model.max_rows))
    return max(rows, tokens / each) * request.output * step_s / running  # type: ignore[no-any-return]


@compiled
def added_excess(model: Records, group: Records, request: Records, after_s: float) -> float:
    """How much further all rows' promises are exceeded with the request than without it."""
    rows, output = group.batch.rows, max(1.0, request.output)
    if rows == 0:
        return 0.0
    each = rows / group.starts if group.starts > 0.0 else 1.0  # output tokens of a row
    before_spread_s = group.correction * spread_s(model, rows, group.starts, group.start_tokens, each)
    starts, tokens = group.starts + 1.0 / output, group.start_tokens + request.prompt / output
    after_spread_s = group.correction * spread_s(model, rows, starts, tokens, each)
    number, excess = max(0, group.tightest), 0.0
    while number < NO_PROMISE and MARGIN * promised_s(number) < after_s + FAR * after_spread_s:
        if group.promises[number] > 0:
            promise_s = promised_s(number)
            more = excess_of(after_s, after_spread_s, promise_s)
            more -= excess_of(group.tpot_s, before_spread_s, promise_s)
            excess += group.promises[number] * max(0.0, more)
        number += 1
    return excess


@compiled
def excess_of(tpot_s: float, spread_s: float, promise_s: float) -> float:
    """The share of a promise by which a TPOT with this mean and spread is expected to exceed it: about 0 if
    the mean is well below the promise, and the difference if it is well above."""
    if promise_s == math.inf:
        return 0.0
    width_s = max(spread_s, LEAST_SPREAD * promise_s) / LOGISTIC
    over = (tpot_s - MARGIN * promise_s) / width_s
    if over > FAR:
        return (tpot_s - MARGIN * promise_s) / promise_s
    return width_s * math.log1p(math.exp(max(over, -FAR))) / promise_s
