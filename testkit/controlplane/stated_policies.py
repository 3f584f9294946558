"""Each baseline's rule, said once more in plain Python, from its source's description.

SCORING gives the score of each group that may be chosen, more is better; CHOOSING gives the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from controlplane.routing.prospect import prospect
from controlplane.routing.scorers.total import cost_s
from controlplane.routing.snapshot import IN_HOST_MEMORY, IN_SLOT, LOADING, NO_PROMISE, promised_s
from testkit.controlplane.random_snapshots import World, next_draw, pair, step_s

Scores = dict[int, float]
_promised_s: Callable[[int], float] = getattr(promised_s, "py_func", promised_s)


def rows(world: World, g: int) -> int:
    return int(world.snapshot.groups[g].batch.rows)


def roomy(world: World) -> list[int]:
    def fits(g: int) -> bool:
        tokens = world.snapshot.groups[g].batch.context + world.request.prompt + world.request.output
        return bool(rows(world, g) < world.model(g).max_rows and tokens <= world.model(g).kv_tokens)

    return [g for g in world.usable if fits(g)]


def most_idle(world: World) -> Scores:
    return {g: -rows(world, g) for g in world.usable}


def caraserve(world: World) -> Scores:
    return {g: -_cara_cost_s(world, g) for g in roomy(world) or world.usable}


def _cara_cost_s(world: World, g: int) -> float:
    group, model, request = world.snapshot.groups[g], world.model(g), world.request
    context = request.prompt + request.output / 2
    after_s = group.correction * step_s(world.snapshot, g, int(request.variant), context, 1)
    steps = math.ceil(request.prompt / model.batched_tokens)
    at = request.prompt / steps / model.prefill_grain
    low = float(model.prefill_s[int(at)])
    one_s = low + (float(model.prefill_s[int(at) + 1]) - low) * (at - int(at))
    token_s = world.snapshot.variants[group.model, request.variant].token_s
    prefill_s = group.correction * (steps * one_s + request.prompt * token_s)
    cost_s = rows(world, g) * (prefill_s + max(0.0, after_s - group.step_s) * request.output)
    promises = [_promised_s(number) for number in range(NO_PROMISE) if group.promises[number]]
    broken = any(after_s > promised for promised in [*promises, request.tpot_s])
    return float(cost_s + (1e6 if broken else 0.0))


def drawn(world: World, among: list[int]) -> list[int]:
    draw = next_draw(world.state)
    return sorted(among, key=lambda g: pair(draw, int(world.snapshot.groups[g].key)))


def random_choice(world: World) -> int:
    return drawn(world, world.usable)[0]


def _of_two(world: World, among: list[int]) -> int:
    return min(drawn(world, among)[:2], key=lambda g: rows(world, g))


def two_choices(world: World) -> int:
    return _of_two(world, _taking(world) or world.usable)


def _taking(world: World) -> list[int]:
    return [g for g in world.usable if rows(world, g) < world.model(g).max_rows]


def serve_multiplex(world: World) -> int:
    taking = _taking(world)
    if not world.request.variant:
        return _of_two(world, taking or world.usable)
    having = [g for g in taking if world.held(g).where in (LOADING, IN_SLOT)]
    fewest = min((world.snapshot.groups[g].distinct for g in taking), default=0)
    few = [g for g in taking if world.snapshot.groups[g].distinct == fewest]
    return _of_two(world, having or few or world.usable)


def _engine_scores(world: World) -> Scores:
    """The scorers of queues and of KV cache."""
    queue = {g: _waiting(world, g) for g in world.usable}
    low, high = min(queue.values()), max(queue.values())
    scores = {}
    for g, count in queue.items():
        used = world.snapshot.groups[g].batch.context / world.model(g).kv_tokens
        scores[g] = (1.0 if low == high else (high - count) / (high - low)) + max(0.0, 1.0 - used)
    return scores


def _waiting(world: World, g: int) -> int:
    group, model = world.snapshot.groups[g], world.model(g)
    each = max(1.0, group.batch.context / max(1, rows(world, g)))
    without_slot = max(0, group.distinct - model.slots) / max(1, group.distinct)
    return int(
        max(
            0,
            math.ceil(rows(world, g) - model.max_rows),
            math.ceil((group.batch.context - model.kv_tokens) / each),
            math.ceil((group.unfilled - model.batched_tokens) / each),
            math.ceil(rows(world, g) * without_slot - 1e-9),
        )
    )


def adapter_affinity(world: World) -> Scores:
    scores = _engine_scores(world)
    for g in scores:
        capacity = world.snapshot.groups[g].distinct < world.model(g).slots
        is_active = world.request.variant and world.held(g).rows
        scores[g] += 1.0 if is_active else 0.8 if capacity else 0.0
    return scores


def load_state(world: World) -> Scores:
    scores = _engine_scores(world)
    home = by_hash(world)[0]
    for g in scores:
        slots = int(world.model(g).slots)
        free = max(0, slots - int(world.snapshot.groups[g].distinct)) / slots
        where = int(world.held(g).where)
        tier = 1.0 if where == IN_SLOT else 0.7 if where == IN_HOST_MEMORY else 0.6 if free else 0.0
        bonus = 0.03 * free + (0.03 if g == home and where != IN_SLOT else 0.0)
        scores[g] += 0.94 * tier + bonus if world.request.variant else 0.94 * free
    return scores


def by_hash(world: World) -> list[int]:
    """Usable groups, the one with the highest hash for the variant first."""
    variant = int(world.request.variant)
    return sorted(world.usable, key=lambda g: -pair(variant, int(world.snapshot.groups[g].key)))


def shuffle_sharding(world: World) -> Scores:
    scores = _engine_scores(world)
    count = len(world.usable)
    size = count if count <= 3 else math.ceil(0.75 * count) if count <= 7 else math.ceil(count * 2 / 3)
    for g in by_hash(world)[:size] if world.request.variant else world.usable:
        scores[g] += 1.0
    return scores


def rendezvous(world: World) -> Scores:
    if not world.request.variant:
        return most_idle(world)
    own = sum(int(world.held(g).rows) for g in world.usable)
    of_all = sum(rows(world, g) - int(world.snapshot.held[0, g].rows) for g in world.usable)
    slots = sum(int(world.model(g).slots) for g in world.usable)
    factor = max(1, own * slots // of_all) if of_all else 1
    return {g: -rows(world, g) for g in by_hash(world)[:factor]}


def pool_of(world: World) -> int:
    """The lowest ceiling with room for the request's rank, or the highest of all."""
    groups, variant = world.snapshot.groups, int(world.request.variant)
    ceilings = [int(groups[g].ceiling) for g in world.usable]
    classes = [world.snapshot.variants[groups[g].model, variant].rank_class for g in world.usable]
    fitting = [ceiling for ceiling, number in zip(ceilings, classes, strict=True) if ceiling >= number]
    return min(fitting) if fitting else max(ceilings)


def least_harm_s(world: World, g: int, pool: int) -> float:
    """The cost in the request's own pool. In another pool: 300 s more, and 1000 s at least."""
    cost = float(cost_s(world.snapshot, g, world.request, prospect(world.snapshot, g, world.request), False))
    return cost if world.snapshot.groups[g].ceiling == pool else max(1000.0, cost + 300.0)


SCORING: dict[str, Callable[[World], Scores]] = {
    "most-idle": most_idle,
    "caraserve": caraserve,
    "adapter-affinity": adapter_affinity,
    "load-state": load_state,
    "shuffle-sharding": shuffle_sharding,
    "rendezvous": rendezvous,
}
CHOOSING: dict[str, Callable[[World], int]] = {
    "random": random_choice,
    "two-choices": two_choices,
    "serve-multiplex": serve_multiplex,
}
