"""LoRAServe-like placement: variants in order of rank, cut into as many parts of equal load as there are
groups.

LoRAServe (arXiv 2511.22880) is known by its abstract only: "workload-aware dynamic adapter placement and
routing designed to tame rank diversity". So variants of similar rank share groups, each group gets the same
load, a hot variant is in several groups, and demand decides again at every tick. A request's weight is its
share of a group that runs only its class of ranks: one over the rows that the group could hold within the
promised TPOT. Compiled.
"""

from __future__ import annotations

from controlplane.baselines.routing.parts.hashed_homes import usable_groups
from controlplane.routing.snapshot import Snapshot
from controlplane.routing.state import MAX_HOMES, RouterState
from profiler.compiled import Records, compiled
from profiler.step_time.records import CLASSES, MAX_ROWS, RANK_CLASSES
from profiler.step_time.steps import decode_curve_s

HOT = 0.25  # of a group's part: a variant with a larger share is in every group that its part touches
COLD = 0.01  # of all load: shared by all variants, so that variants without requests are spread, too
_MOST_RATE = 1e12
_ROUNDING = 1e-9  # a part that ends at a group's end touches no other group


@compiled
def place(snapshot: Snapshot, state: RouterState) -> None:
    """Set the homes of all variants except the base. Linear in the variants and quadratic in the groups."""
    groups = usable_groups(snapshot)
    variants = len(state.homes)
    asked = _load(snapshot, state)
    each = asked * COLD / max(1, variants) if asked > 0.0 else 1.0  # the weight of a variant without requests
    part = (asked + each * (variants - 1)) / max(1, groups)
    if groups == 0 or not part > 0.0:
        return
    before, at, g = 0.0, 0, _next_group(snapshot, -1)
    for c in range(CLASSES):
        weight = request_weight(snapshot, state, c)
        for v in range(1, variants):
            if snapshot.variants[0, v].rank_class == c:
                load = _rate(state, v) * weight + each
                first, last = _span(before, load, part, groups)
                while at < first:
                    at, g = at + 1, _next_group(snapshot, g)
                _begin(state, v, g)
                while at < last:
                    at, g = at + 1, _next_group(snapshot, g)
                    _also(state, v, g)
                before += load


@compiled
def _span(before: float, load: float, part: float, groups: int) -> tuple[int, int]:
    """The first and the last part of a variant: the same one, unless the variant is hot."""
    if load < HOT * part:
        middle = min(groups - 1, int((before + load / 2) / part))
        return middle, middle
    return min(groups - 1, int(before / part)), min(groups - 1, int((before + load) / part - _ROUNDING))


@compiled
def _begin(state: RouterState, v: int, g: int) -> None:
    """Set a variant's first home. A changed first home counts as a move."""
    home = state.homes[v]
    if home.count > 0 and home.groups[0] != g:
        state.clock[0].moves += 1
    home.count = 1
    home.groups[0] = g


@compiled
def _also(state: RouterState, v: int, g: int) -> None:
    home = state.homes[v]
    if home.count < MAX_HOMES:
        home.groups[home.count] = g
        home.count += 1


@compiled
def _load(snapshot: Snapshot, state: RouterState) -> float:
    load = 0.0
    for c in range(CLASSES):
        weight = request_weight(snapshot, state, c)
        for v in range(1, len(state.homes)):
            if snapshot.variants[0, v].rank_class == c:
                load += _rate(state, v) * weight
    return load


@compiled
def _rate(state: RouterState, v: int) -> float:
    """A variant's requests per second; 0 if it is not a number."""
    rate = state.demand[v].rate
    return min(rate, _MOST_RATE) if rate > 0.0 else 0.0


@compiled
def request_weight(snapshot: Snapshot, state: RouterState, c: int) -> float:
    """One over the rows of a class that a group can hold with steps within the class's mean promise."""
    model = snapshot.models[0]
    asked = state.classes[c]
    if not asked.rate_tokens > 0.0:
        return 1.0
    context = asked.rate_context / asked.rate_tokens
    promise_s = asked.rate_promise / asked.rate_tokens
    row_s = model.context_s * context + model.padded_s * RANK_CLASSES[c] + _row_s(snapshot, c)
    low, high = 1, max(1, min(MAX_ROWS, int(model.max_rows)))
    while low < high:
        rows = low + (high - low + 1) // 2
        if decode_curve_s(model, rows) + rows * row_s <= promise_s:
            low = rows
        else:
            high = rows - 1
    return 1.0 / low


@compiled
def _row_s(snapshot: Snapshot, c: int) -> float:
    """The time that a row of the first variant of a class adds to a step."""
    for v in range(1, snapshot.variants.shape[1]):
        if snapshot.variants[0, v].rank_class == c:
            return snapshot.variants[0, v].row_s  # type: ignore[no-any-return]
    return 0.0


@compiled
def _next_group(snapshot: Snapshot, g: int) -> int:
    """The usable group with the next larger key (among equal keys, the next index); the first after -1;
    `g` if it is the last."""
    best = -1
    for other in range(len(snapshot.groups)):
        follows = g < 0 or _is_before(snapshot.groups, g, other)
        if snapshot.groups[other].usable and follows:
            best = other if best < 0 or _is_before(snapshot.groups, other, best) else best
    return best if best >= 0 else g


@compiled
def _is_before(groups: Records, one: int, other: int) -> bool:
    if groups[one].key == groups[other].key:
        return one < other
    return bool(groups[one].key < groups[other].key)
