"""Which waiting requests may be admitted, and which running ones must be preempted. Pure, compiled.

DeltaZip, section 5.4: at most N variants run at once. A request whose variant already runs may skip the line.
It is then the child of that variant's oldest running request. When that parent is done its children are
preempted, so that earlier requests of other variants get their turn.
Beyond the paper: a child that is about to finish is not preempted, and a request without room in memory
counts as blocked, too. Once a blocked request has waited too long, running variants are closed, as many as
must leave for the variants of such requests. A closed variant admits no request that came after the first
blocked one, so it leaves when its running requests are done. The variants with the fewest rows for their
bytes are closed: a step reads the bytes of each variant once for all its rows. The other variants admit all
requests, and keep their children: an overloaded engine keeps its rows.

This gives a bound. Until the patience ends, a request begins at the latest when all earlier requests are
done, plus the rest of an almost finished child, plus its variant's loading. After it, the request begins when
the running requests of one variant are done. Before that, the variants that are awaited longer take their
turns, `limit` at a time. Memory that a variant lacks is freed one variant at a time.

Requests and variants are records. Inputs and decisions are fields of the same record, so nothing is
allocated: an engine and the simulator run this before every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from profiler.compiled import Records, compiled

BASE = 0
NOBODY = -1

# The state of a variant for admission. READY: in a slot on every rank. LOADING: on its way there. ABSENT: in
# no slot. NO_MEMORY: some rank has no room for it until others leave.
READY, LOADING, ABSENT, NO_MEMORY = range(4)

# `key` is the request's own, above the keys of all earlier requests; requests come in order of arrival, then
# of key. `variant` indexes VARIANTS. `parent` is the key of the request behind which it skipped the line, or
# -1. `tokens_left`: the most it may still generate. Decided: `preempts`.
RUNNING = np.dtype(
    [
        ("arrival_s", "f8"),
        ("key", "i8"),
        ("parent", "i8"),
        ("variant", "i4"),
        ("tokens_left", "i4"),
        ("preempts", "u1"),
    ],
    align=True,
)

# In order of arrival, and of key if arrivals are equal. Decided: `admitted`; `parent`, the request behind
# which it skips the line, or itself once a request is out of patience; `blocked` if it waits for a running
# variant to end.
WAITING = np.dtype(
    [
        ("arrival_s", "f8"),
        ("key", "i8"),
        ("parent", "i8"),
        ("variant", "i4"),
        ("admitted", "u1"),
        ("blocked", "u1"),
    ],
    align=True,
)

# Every variant that occurs; the first is the base, which is READY. `cost`: its extra cost for a step that has
# any of its rows, in any common unit, such as its bytes. Decided: `active`, if it runs or may run next (it
# keeps its slot); `load`: its number, from 1, in the order in which slots should be given. The other fields
# are the policy's own; `closed` is kept from decision to decision, and 0 at first.
VARIANTS = np.dtype(
    [
        ("readiness", "i4"),
        ("cost", "f8"),
        ("active", "u1"),
        ("load", "i4"),
        ("parent", "i8"),
        ("parent_s", "f8"),
        ("rows", "i4"),
        ("overdue", "u1"),
        ("closed", "u1"),
    ],
    align=True,
)


class Rules(NamedTuple):
    """The policy's parameters. `limit`: variants that run at once."""

    limit: int
    longest_wait_s: float
    almost_done_tokens: int = 8


@compiled
def decide(now_s: float, running: Records, waiting: Records, variants: Records, rules: Rules) -> int:
    """Decide one step's admissions, in the records; returns how many requests are admitted.

    Linear in running and waiting requests, except for children whose parent is gone.
    """
    active = _clear(running, waiting, variants)
    admitted, in_turn = _in_turn(waiting, variants, active, rules.limit)
    overdue = _overdue(now_s, waiting, variants, in_turn, rules.longest_wait_s)
    _close(variants, overdue, rules.limit)
    if in_turn < len(waiting):
        admitted += _out_of_turn(running, waiting, variants, in_turn, overdue > 0)
        _preempt_orphans(running, waiting, variants, in_turn, overdue > 0, rules.almost_done_tokens)
    return admitted


@compiled
def _clear(running: Records, waiting: Records, variants: Records) -> int:
    """Clear the last decision, except the closed variants; returns how many variants run."""
    for v in range(len(variants)):
        variants[v].active = variants[v].load = variants[v].rows = variants[v].overdue = 0
        variants[v].parent = NOBODY
    active = 0
    for i in range(len(running)):
        running[i].preempts = 0
        variant = running[i].variant
        variants[variant].rows += 1
        if variant != BASE and not variants[variant].active:
            variants[variant].active = 1
            active += 1
    for i in range(len(waiting)):
        waiting[i].admitted = waiting[i].blocked = 0
        waiting[i].parent = NOBODY
    return active


@compiled
def _in_turn(waiting: Records, variants: Records, active: int, limit: int) -> tuple[int, int]:
    """Activate variants in order of arrival, up to the first request whose variant cannot be activated.

    Returns how many requests are admitted, and that request's index.
    """
    admitted = loads = 0
    for i in range(len(waiting)):
        number = waiting[i].variant
        variant = variants[number]
        if number != BASE and not variant.active:
            if variant.readiness == NO_MEMORY or active >= limit:
                return admitted, i
            variant.active = 1  # even while it loads: later requests may not take its place
            active += 1
            if variant.readiness == ABSENT:
                loads += 1
                variant.load = loads
        if variant.readiness == READY:
            waiting[i].admitted = 1
            admitted += 1
    return admitted, len(waiting)


@compiled
def _overdue(now_s: float, waiting: Records, variants: Records, in_turn: int, longest_wait_s: float) -> int:
    """The number of variants that blocked requests have waited for too long."""
    count = 0
    for i in range(in_turn, len(waiting)):
        if now_s - waiting[i].arrival_s <= longest_wait_s:
            break  # later requests have not waited too long either
        number = waiting[i].variant
        variant = variants[number]
        if number != BASE and not variant.active and not variant.overdue:
            variant.overdue = 1
            count += 1
    return count


@compiled
def _close(variants: Records, overdue: int, limit: int) -> None:
    """Close as many running variants as must leave for the overdue ones, or all of them.

    It closes at least one, as the first overdue variant may lack memory rather than a slot. A closed variant
    stays closed while it counts.
    """
    count = 0
    if overdue > 0:
        for v in range(1, len(variants)):
            count += variants[v].active
        count = max(1, count + overdue - limit)
    for v in range(len(variants)):
        if variants[v].closed and variants[v].rows > 0 and count > 0:
            count -= 1
        else:
            variants[v].closed = 0
    while count > 0:
        first = NOBODY
        for v in range(1, len(variants)):
            other = variants[v]
            if other.rows == 0 or other.closed:
                continue
            if first == NOBODY or _leaves_before(other, variants[first]):
                first = v
        if first == NOBODY:
            return
        variants[first].closed = 1
        count -= 1


@compiled
def _leaves_before(one: Records, other: Records) -> bool:
    """Whether `one` has fewer rows for its cost; if equal, fewer rows."""
    weight, other_weight = one.rows * other.cost, other.rows * one.cost
    return weight < other_weight or (weight == other_weight and one.rows < other.rows)  # type: ignore[no-any-return]


@compiled
def _out_of_turn(running: Records, waiting: Records, variants: Records, in_turn: int, overdue: bool) -> int:
    """Admit requests behind a blocked one; returns how many.

    These are the base's requests, and children of living parents; if the blocked request is overdue, requests
    of all variants that are not closed.
    """
    blocked = waiting[in_turn]
    if not overdue:
        _find_parents(running, waiting, variants, in_turn)
    admitted = 0
    for i in range(in_turn, len(waiting)):
        request = waiting[i]
        variant = variants[request.variant]
        if request.variant == BASE:
            request.admitted = 1
            admitted += 1
        elif not variant.active:
            request.blocked = 1
        elif variant.readiness == READY and (variant.parent != NOBODY or (overdue and not variant.closed)):
            request.admitted = 1
            request.parent = request.key if overdue else variant.parent
            admitted += 1
    if variants[blocked.variant].readiness == NO_MEMORY:
        loads = 0
        for v in range(len(variants)):
            loads = max(loads, variants[v].load)
        variants[blocked.variant].load = loads + 1  # only this variant: two would take each other's room
    return admitted


@compiled
def _find_parents(running: Records, waiting: Records, variants: Records, in_turn: int) -> None:
    """Find, for each variant, the request behind which its requests may skip the line.

    It is its oldest running request, except children that came after the blocked request; else the first of
    those just admitted.
    """
    blocked = waiting[in_turn]
    for i in range(len(running)):
        request = running[i]
        variant = variants[request.variant]
        if request.parent != NOBODY and _came_after(
            request.arrival_s, request.key, blocked.arrival_s, blocked.key
        ):
            continue
        if variant.parent == NOBODY or _came_after(
            variant.parent_s, variant.parent, request.arrival_s, request.key
        ):
            variant.parent, variant.parent_s = request.key, request.arrival_s
    for i in range(in_turn):
        variant = variants[waiting[i].variant]
        if variant.parent == NOBODY and waiting[i].admitted:
            variant.parent, variant.parent_s = waiting[i].key, waiting[i].arrival_s


@compiled
def _preempt_orphans(
    running: Records,
    waiting: Records,
    variants: Records,
    in_turn: int,
    overdue: bool,
    almost_done_tokens: int,
) -> None:
    """Preempt children whose parent is gone, that came after a blocked request, and that are far from done.

    If the blocked request is overdue, only children of closed variants are preempted.
    """
    blocked = waiting[in_turn]
    for i in range(len(running)):
        child = running[i]
        if (
            child.parent != NOBODY
            and (not overdue or variants[child.variant].closed)
            and child.tokens_left > almost_done_tokens
            and _came_after(child.arrival_s, child.key, blocked.arrival_s, blocked.key)
            and not _is_alive(running, waiting, child.parent)
        ):
            child.preempts = 1


@compiled
def _is_alive(running: Records, waiting: Records, key: int) -> bool:
    for i in range(len(running)):
        if running[i].key == key:
            return True
    for i in range(len(waiting)):  # noqa: SIM110  # compiled code has no generators
        if waiting[i].key == key:
            return True
    return False


@compiled
def _came_after(one_s: float, one_key: int, other_s: float, other_key: int) -> bool:
    return one_s > other_s or (one_s == other_s and one_key > other_key)
