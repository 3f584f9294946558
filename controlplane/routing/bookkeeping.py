"""A snapshot kept up to date: a request is sent to a group, its prompt is filled, it ends. Compiled.

A few additions each, however many requests a group has.

Between two steps in which all rows decode, prompts are filled. With n rows that each make L tokens, one every
`tpot`, n / (L tpot) requests start each second (Little's law), and each makes one step longer, by p seconds.
So `tpot = step + n p / L`: every row adds 1 / L starts for every token of the others.
"""

from __future__ import annotations

from controlplane.routing.snapshot import NO_PROMISE, Snapshot
from profiler.compiled import Records, compiled
from profiler.step_time.steps import add, decode_curve_s, decode_step_s, prefill_curve_s, remove

FEW = 4
MOST_STRETCH = 3.0
STRETCH_WEIGHT = 0.02


@compiled
def context_of(request: Records) -> float:
    """The tokens that a request has cached on average while it decodes."""
    return request.prompt + request.output / 2  # type: ignore[no-any-return]


@compiled
def starts_s(model: Records, rows: int, starts: float, tokens: float, added_s: float) -> float:
    """What requests that start add to the TPOT of others: for `starts` (a token), with `tokens` of prompts (a
    token) in all, beside `rows` that decode."""
    if starts <= 0.0:
        return 0.0
    longer_s = prefill_curve_s(model, tokens / starts + rows) - decode_curve_s(model, rows)
    return starts * max(0.0, longer_s) + added_s


@compiled
def prompt_s(snapshot: Snapshot, g: int, request: Records) -> float:
    """What the request's variant adds to its prefill."""
    variant = snapshot.variants[snapshot.groups[g].model, request.variant]
    return request.prompt * variant.token_s  # type: ignore[no-any-return]


@compiled
def sent(snapshot: Snapshot, g: int, request: Records) -> None:
    """`request` goes to group `g`."""
    group = snapshot.groups[g]
    held = snapshot.held[g, request.variant]
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
    """Its first token has come."""
    group = snapshot.groups[g]
    group.unfilled = max(0.0, group.unfilled - request.prompt)


@compiled
def ended(snapshot: Snapshot, g: int, request: Records, was_filled: bool) -> None:
    """It has ended, or was cancelled."""
    group = snapshot.groups[g]
    held = snapshot.held[g, request.variant]
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
    if group.batch.rows == 0:  # what is left of sums is rounding
        group.unfilled = group.starts = group.start_tokens = group.start_s = 0.0
    group.promises[request.promise] -= 1
    tightest = group.tightest
    while tightest < NO_PROMISE and group.promises[tightest] == 0:
        tightest += 1
    group.tightest = tightest
    renew(snapshot, g)


@compiled
def cached(snapshot: Snapshot, g: int, tokens: float) -> None:
    """A group's engine has so many tokens in its KV cache, or waiting to be filled. What is no number, and a
    batch of few, changes nothing."""
    group = snapshot.groups[g]
    if group.batch.rows >= FEW and group.batch.context > 0.0 and tokens > 0.0:
        seen = min(MOST_STRETCH, max(1.0 / MOST_STRETCH, tokens / group.batch.context))
        group.stretch += STRETCH_WEIGHT * (seen - group.stretch)


@compiled
def renew(snapshot: Snapshot, g: int) -> None:
    """The cached times of a group."""
    group = snapshot.groups[g]
    model = snapshot.models[group.model]
    group.step_s = group.correction * decode_step_s(model, group.batch)
    others_s = starts_s(model, group.batch.rows, group.starts, group.start_tokens, group.start_s)
    group.tpot_s = group.step_s + group.correction * others_s
