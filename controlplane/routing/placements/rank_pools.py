"""Give groups ceilings of rank if kernels pad, so that a rank of 64 does not slow a rank of 8. Compiled.

With a padding kernel every row of a batch costs as much as its largest rank, so a group with similar ranks
holds more rows within the same TPOT. The requested classes of ranks are cut into pools of neighbours, and the
groups are divided so that the busiest pool is as little busy as possible. Every cut is tried: there are at
most 64. How busy a pool is: the rows that it needs at once, with room for chance (two standard deviations of
a Poisson count), over the rows that its groups hold within the promise. The current pools stay unless the
busiest pool would be much less busy.
"""

from __future__ import annotations

import math

from controlplane.routing.snapshot import Snapshot
from controlplane.routing.starts import starts_s
from controlplane.routing.state import RouterState
from profiler.compiled import Records, compiled
from profiler.step_time.records import CLASSES, RANK_CLASSES
from profiler.step_time.steps import decode_curve_s

GAIN = 1.2  # groups change pools if the busiest pool is now this much busier than that of the best cut
DEVIATIONS = 2.0
TARGET = 0.9  # of the promise: the time of a step of a full group
NO_CEILING = 99
FULL = 0.9  # of the KV cache and of the slots: the part that is usable despite chance
LEAST_SHARED = 1.25  # rows of a variant in a group: if slots are scarce, requests go where their variant is


@compiled
def place(snapshot: Snapshot, state: RouterState) -> None:
    """Set the ceilings of groups that serve. Without padding, or without demand, there are none."""
    serving = 0
    for g in range(len(snapshot.groups)):
        serving += 1 if snapshot.groups[g].healthy else 0
    if serving == 0 or snapshot.models[0].padded_s <= 0.0:
        return
    best = _best_cut(snapshot, state, serving)
    if best < 0:
        return
    wanted = _try_cut(snapshot, state, best, serving, 0)
    if _busiest_now(snapshot, state) > GAIN * wanted:
        _assign(snapshot, state)


@compiled
def _best_cut(snapshot: Snapshot, state: RouterState, serving: int) -> int:
    """The cut whose busiest pool is least busy, as bits: a set bit ends a pool at that class; -1 without
    demand."""
    asked = 0
    for c in range(CLASSES):
        if state.classes[c].rate_tokens > 0.0:
            asked |= 1 << c
    best, least = -1, math.inf
    for cut in range(1, 1 << CLASSES):
        # Pools end at requested classes, including the last one.
        if cut & ~asked == 0 and cut > asked >> 1:
            busiest = _try_cut(snapshot, state, cut, serving, 1)
            if busiest < least:
                best, least = cut, busiest
    return best


@compiled
def _try_cut(snapshot: Snapshot, state: RouterState, cut: int, serving: int, place_at: int) -> float:
    """Divide the groups for a cut, into `state.pools[place_at]`. Returns how busy its busiest pool is."""
    pools = state.pools[place_at]
    count, since = 0, 0
    for c in range(CLASSES):
        pools[c].groups = 0
        pools[c].rows = 0.0
        if cut >> c & 1:
            rows = 0.0
            for member in range(since, c + 1):
                rows += rows_at_once(state.classes[member])
            pools[c].rows = rows + DEVIATIONS * math.sqrt(rows)
            pools[c].each = rows_within(snapshot, state.classes, since, c, correction_of(snapshot, c))
            pools[c].groups = 1
            count += 1
            since = c + 1
    if count > serving:
        return math.inf
    for _ in range(serving - count):
        pools[_busiest(pools)].groups += 1
    busiest = pools[_busiest(pools)]
    return busiest.rows / (busiest.each * busiest.groups)  # type: ignore[no-any-return]


@compiled
def _busiest(pools: Records) -> int:
    worst, most = 0, -1.0
    for c in range(CLASSES):
        pool = pools[c]
        if pool.groups > 0 and pool.rows / (pool.each * pool.groups) > most:
            worst, most = c, pool.rows / (pool.each * pool.groups)
    return worst


@compiled
def mean_stretch(snapshot: Snapshot) -> float:
    total, count = 0.0, 0
    for g in range(len(snapshot.groups)):
        if snapshot.groups[g].healthy:
            total += snapshot.groups[g].stretch
            count += 1
    return max(0.1, total / count) if count else 1.0


@compiled
def rows_a_variant(snapshot: Snapshot) -> float:
    """The current number of rows for each variant in a group."""
    rows, distinct = 0.0, 0.0
    for g in range(len(snapshot.groups)):
        if snapshot.groups[g].healthy:
            rows += snapshot.groups[g].batch.rows
            distinct += snapshot.groups[g].distinct
    return max(LEAST_SHARED, rows / distinct) if distinct > 0.0 else LEAST_SHARED


@compiled
def rows_at_once(of_class: Records) -> float:
    """Little's law: tokens per second, each present for a promised TPOT."""
    return TARGET * of_class.rate_promise  # type: ignore[no-any-return]


@compiled
def correction_of(snapshot: Snapshot, ceiling: int) -> float:
    """The mean correction of the groups with a ceiling; 1 if there are none."""
    total, count = 0.0, 0
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.healthy and group.ceiling == ceiling:
            total += group.correction
            count += 1
    return total / count if count else 1.0


@compiled
def rows_within(snapshot: Snapshot, classes: Records, since: int, last: int, correction: float) -> float:
    """How many rows of the classes `since` to `last` a group holds with a TPOT within TARGET of the promise;
    at least one."""
    starts = prompts = start_s = tokens = contexts = promises = 0.0
    for c in range(since, last + 1):
        starts += classes[c].rate_starts
        prompts += classes[c].rate_prompts
        start_s += classes[c].rate_start_s
        tokens += classes[c].rate_tokens
        contexts += classes[c].rate_context
        promises += classes[c].rate_promise
    context, promise_s = contexts / tokens, promises / tokens
    model = snapshot.models[0]
    stretch, shared = mean_stretch(snapshot), rows_a_variant(snapshot)
    most = min(model.kv_tokens / (context * stretch), model.slots * shared)
    low, high = 1, int(min(model.max_rows, max(1.0, FULL * most)))
    while low < high:
        rows = low + (high - low + 1) // 2  # low + high may overflow
        seconds = decode_curve_s(model, rows)
        seconds += rows * (model.context_s * context + model.padded_s * RANK_CLASSES[last])
        seconds += starts_s(
            model, rows, rows * starts / tokens, rows * prompts / tokens, rows * start_s / tokens
        )
        if correction * seconds <= TARGET * promise_s:
            low = rows
        else:
            high = rows - 1
    return float(low)


@compiled
def _busiest_now(snapshot: Snapshot, state: RouterState) -> float:
    """How busy the busiest pool would be with the current ceilings; infinite if a class has none."""
    now, chosen = state.pools[1], state.pools[0]
    for c in range(CLASSES):
        now[c].groups, now[c].rows, now[c].each = 0, chosen[c].rows, chosen[c].each
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.healthy and group.ceiling < CLASSES:
            now[group.ceiling].groups += 1
    for c in range(CLASSES):
        if (chosen[c].groups > 0) != (now[c].groups > 0):
            return math.inf
    busiest = now[_busiest(now)]
    return busiest.rows / (busiest.each * max(1, busiest.groups))  # type: ignore[no-any-return]


@compiled
def _assign(snapshot: Snapshot, state: RouterState) -> None:
    """Assign ceilings. As few groups as possible change, and these are the groups with the fewest rows."""
    pools = state.pools[0]
    for c in range(CLASSES):
        pools[c].kept = 0
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.healthy and group.ceiling < CLASSES and pools[group.ceiling].groups:
            pools[group.ceiling].kept += 1
        elif group.healthy:
            group.ceiling = NO_CEILING
    for c in range(CLASSES):
        while pools[c].kept > pools[c].groups:
            snapshot.groups[_idlest(snapshot, c)].ceiling = NO_CEILING
            pools[c].kept -= 1
    for c in range(CLASSES - 1, -1, -1):  # the highest first: a high rank harms most in another pool
        while pools[c].kept < pools[c].groups:
            snapshot.groups[_idlest(snapshot, NO_CEILING)].ceiling = c
            pools[c].kept += 1
            state.clock[0].moves += 1


@compiled
def _idlest(snapshot: Snapshot, ceiling: int) -> int:
    best = -1
    for g in range(len(snapshot.groups)):
        group = snapshot.groups[g]
        if group.healthy and group.ceiling == ceiling:
            if best < 0 or group.batch.rows < snapshot.groups[best].batch.rows:
                best = g
            elif group.batch.rows == snapshot.groups[best].batch.rows:
                best = g if group.key < snapshot.groups[best].key else best
    return best
