"""What would come of sending a request to a group. Compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

from controlplane.routing.snapshot import (
    ELSEWHERE,
    IN_HOST_MEMORY,
    LOADING,
    Snapshot,
    promise_class,
    promised_s,
)
from controlplane.routing.starts import context_of, prompt_s, starts_s
from profiler.compiled import Records, compiled
from profiler.step_time.steps import prefill_curve_s, step_with_one_more_s

MARGIN = 0.93  # a promise counts as kept up to this share of it: predictions err by a few percent


class Prospect(NamedTuple):
    """Seconds. `ttft_s`: from now to the request's first token; `step_s` a step with it, `added_s` how much
    longer that is than without. `tpot_s` and `added_tpot_s` are the same with what prefills take between
    steps. `broken`: rows in the batch whose TPOT would be kept without it and not with it; `breaks_own`: its
    own TPOT or TTFT would not be kept. `rows` are those it would share steps with."""

    ttft_s: float
    step_s: float
    added_s: float
    broken: int
    breaks_own: bool
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
    )  # its own prefill comes before it decodes, so that is in the others' TPOT alone
    others_s = step_s + group.correction * starts_s(
        model,
        rows,
        group.starts + 1.0 / output,
        group.start_tokens + request.prompt / output,
        group.start_s + prompt_s(snapshot, g, request) / output,
    )
    broken = newly_broken(group, group.tpot_s, others_s)
    late = request.waited_s + ttft_s > request.ttft_s
    breaks_own = late or own_s > MARGIN * request.tpot_s
    added_s = max(0.0, step_s - group.step_s)
    return Prospect(
        ttft_s,
        step_s,
        added_s,
        broken,
        breaks_own,
        group.batch.rows,
        own_s,
        max(0.0, others_s - group.tpot_s),
    )


@compiled
def first_token_s(snapshot: Snapshot, g: int, request: Records, step_s: float) -> float:
    """Prompts before it are filled first; then its own, once it has room and its variant is there."""
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
            wait_s += request.output * step_s / 2  # until a variant in a slot has no more requests
    return wait_s + group.correction * prefill_s + model.path_s  # type: ignore[no-any-return]


@compiled
def load_s(variant: Records, where: int) -> float:
    if where == ELSEWHERE:
        return variant.fetch_s + variant.load_s  # type: ignore[no-any-return]
    return variant.load_s if where == IN_HOST_MEMORY else variant.load_s / 2  # type: ignore[no-any-return]


@compiled
def places_s(group: Records, model: Records, request: Records, step_s: float) -> float:
    """How long it waits for a row, or for KV cache, that others have: they end one after the other."""
    rows = max(0.0, group.batch.rows + 1.0 - model.max_rows)
    context = group.stretch * group.batch.context
    tokens = max(0.0, context + request.prompt + request.output - model.kv_tokens)
    each = max(1.0, context / max(1, group.batch.rows))
    running = max(1.0, min(group.batch.rows, model.max_rows))
    return max(rows, tokens / each) * request.output * step_s / running  # type: ignore[no-any-return]


@compiled
def newly_broken(group: Records, before_s: float, after_s: float) -> int:
    """Rows whose promise lies between two step times."""
    number, count = max(0, group.tightest, promise_class(before_s / MARGIN) - 1), 0
    while MARGIN * promised_s(number) < after_s:
        if MARGIN * promised_s(number) >= before_s:
            count += group.promises[number]
        number += 1
    return count
