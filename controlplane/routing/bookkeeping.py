"""Keep a snapshot current: a request is sent to a group, its prompt is filled, it ends. Compiled.

Each event costs a few additions, however many requests a group has. It also moves the group to its new place
in the orders (`controlplane.routing.orders`), if there are any.
"""

from __future__ import annotations

from controlplane.routing.orders import put
from controlplane.routing.snapshot import NO_PROMISE, Snapshot
from controlplane.routing.starts import context_of, prompt_s, starts_s
from profiler.compiled import Records, compiled
from profiler.step_time.steps import add, decode_step_s, remove

FEW = 4
MOST_STRETCH = 3.0
STRETCH_WEIGHT = 0.02


@compiled
def sent(snapshot: Snapshot, g: int, request: Records) -> None:
    """The request is sent to group `g`."""
    group = snapshot.groups[g]
    held = snapshot.held[request.variant, g]
    is_first = held.rows == 0
    add(group.batch, snapshot.variants[group.model, request.variant], context_of(request), is_first)
    held.rows += 1
    if is_first and request.variant:
        group.distinct += 1
    group.unfilled += request.prompt
    output = max(1.0, request.output)
    group.starts += 1.0 / output
    group.start_tokens += request.prompt / output
    group.start_s += prompt_s(snapshot, g, request) / output
    group.promises[request.promise] += 1
    group.tightest = min(group.tightest, request.promise)
    renew(snapshot, g)


@compiled
def filled(snapshot: Snapshot, g: int, request: Records) -> None:
    """The request's first token has come."""
    group = snapshot.groups[g]
    group.unfilled = max(0.0, group.unfilled - request.prompt)
    put(snapshot, g)


@compiled
def ended(snapshot: Snapshot, g: int, request: Records, was_filled: bool) -> None:
    """The request has ended, or was cancelled."""
    group = snapshot.groups[g]
    held = snapshot.held[request.variant, g]
    held.rows -= 1
    was_last = held.rows == 0
    remove(group.batch, snapshot.variants[group.model, request.variant], context_of(request), was_last)
    if was_last and request.variant:
        group.distinct -= 1
    if not was_filled:
        group.unfilled = max(0.0, group.unfilled - request.prompt)
    output = max(1.0, request.output)
    group.starts -= 1.0 / output
    group.start_tokens -= request.prompt / output
    group.start_s -= prompt_s(snapshot, g, request) / output
    if group.batch.rows == 0:  # the remaining sums are rounding errors
        group.unfilled = group.starts = group.start_tokens = group.start_s = 0.0
    group.promises[request.promise] -= 1
    tightest = group.tightest
    while tightest < NO_PROMISE and group.promises[tightest] == 0:
        tightest += 1
    group.tightest = tightest
    renew(snapshot, g)


@compiled
def cached(snapshot: Snapshot, g: int, tokens: float) -> None:
    """A group's engine has `tokens` tokens in its KV cache, or waiting to be filled. An invalid number, or a
    small batch, does not change the stretch. In every case the group's place in the orders is updated."""
    group = snapshot.groups[g]
    if group.batch.rows >= FEW and group.batch.context > 0.0 and tokens > 0.0:
        seen = min(MOST_STRETCH, max(1.0 / MOST_STRETCH, tokens / group.batch.context))
        group.stretch += STRETCH_WEIGHT * (seen - group.stretch)
    put(snapshot, g)


@compiled
def set_usable(snapshot: Snapshot, g: int, usable: bool) -> None:
    """Note whether the group serves and has room for one more request."""
    snapshot.groups[g].usable = 1 if usable else 0
    put(snapshot, g)


@compiled
def renew(snapshot: Snapshot, g: int) -> None:
    """Compute the cached times of a group again, from its batch and its correction."""
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    group.step_s = group.correction * decode_step_s(model, group.batch)
    others_s = starts_s(model, group.batch.rows, group.starts, group.start_tokens, group.start_s)
    group.tpot_s = group.step_s + group.correction * others_s
    put(snapshot, g)
