"""An engine on virtual time: vLLM's steps around our scheduling policy. Compiled.

The model has continuous batching, and prompts filled in chunks together with decoding rows. Rows and KV cache
are given first come, first served, and the youngest row is preempted when KV cache runs out. One step is
scheduled ahead. Variants are loaded into slots one after the other, and lie in the host's memory. Steps in
which only the number of cached tokens changes are made at once ("a jump"): with n rows each step takes longer
than the previous one by the time of reading n tokens, so their sum is known.
"""

from __future__ import annotations

import math

from controlplane.routing.snapshot import IN_HOST_MEMORY, IN_SLOT
from controlplane.routing.snapshot import LOADING as ON_ITS_WAY
from controlplane.simulation import agenda, host_memory
from controlplane.simulation.world import NO_INDEX, Rules, World
from profiler.compiled import Records, compiled
from profiler.step_time.records import BASE_KIND
from profiler.step_time.steps import add, decode_step_s, is_wide, mixed_step_s, remove
from workers.scheduling import policy
from workers.scheduling.slots import EMPTY, slot_for

READY, LOADING, ABSENT = policy.READY, policy.LOADING, policy.ABSENT
MANY_STEPS = 1 << 40
_decide, _schedule, _keep = policy.decide, agenda.schedule, host_memory.keep


@compiled
def enqueue(world: World, rules: Rules, g: int, request: int, now_s: float) -> None:
    """A request has reached the engine."""
    engine = world.engines[g]
    queued = world.queue[g, engine.waiting]
    queued.request, queued.generated, queued.admitted = request, 0, 0
    queued.arrival_s = world.asked[request].arrival_s
    queued.due = _due(engine, rules, now_s)
    engine.keys += 1
    queued.key = engine.keys
    queued.variant = _occur(world, g, world.asked[request].variant)
    engine.waiting += 1
    _interrupt(world, rules, g, now_s)


@compiled
def _due(engine: Records, rules: Rules, now_s: float) -> int:
    """The tick after which a new request may be admitted: after the current step, and the steps scheduled
    ahead."""
    if engine.running == 0:
        return engine.ticks  # type: ignore[no-any-return]
    begun = min(engine.steps, steps_within(engine, now_s - engine.start_s)) if engine.steps > 0 else 0
    return engine.ticks + begun + rules.look_ahead  # type: ignore[no-any-return]


@compiled
def _interrupt(world: World, rules: Rules, g: int, now_s: float) -> None:
    """End a jump after the current step and those scheduled ahead; an idle engine begins at once."""
    engine = world.engines[g]
    if engine.steps == 0:
        _schedule(world.next_s, world.winners, g, now_s)
    elif not engine.fills:
        begun = steps_within(engine, now_s - engine.start_s) + rules.look_ahead
        if begun < engine.steps:
            engine.steps = max(1, begun)
            _schedule(world.next_s, world.winners, g, engine.start_s + steps_s(engine, engine.steps))


@compiled
def steps_s(engine: Records, count: int) -> float:
    """The total time of an engine's first `count` steps."""
    return count * (engine.step_s + engine.growth_s * (count - 1) / 2)  # type: ignore[no-any-return]


@compiled
def steps_within(engine: Records, seconds: float) -> int:
    """The number of an engine's steps that have begun after `seconds`; a step that ends just then is the
    last."""
    if seconds <= 0.0:
        return 0
    if engine.step_s <= 0.0:
        return MANY_STEPS
    half_s = engine.step_s - engine.growth_s / 2
    root_s = math.sqrt(half_s * half_s + 2 * engine.growth_s * seconds)
    count = math.ceil(2 * seconds / (half_s + root_s))
    while count > 0 and steps_s(engine, count - 1) >= seconds:  # correct rounding
        count -= 1
    while steps_s(engine, count) < seconds:
        count += 1
    return count  # type: ignore[no-any-return]


@compiled
def _occur(world: World, g: int, variant: int) -> int:
    """The place of a variant among those that occur in the engine, after adding a request. The base's is
    0."""
    if variant == 0:
        world.occurring[g, 0].readiness = READY
        world.engines[g].occurring = max(1, world.engines[g].occurring)
        return 0
    where = world.where[g, variant]
    if where.local == NO_INDEX:
        place = 1
        while place < world.engines[g].occurring and world.occurring[g, place].requests > 0:
            place += 1
        world.engines[g].occurring = max(place + 1, world.engines[g].occurring)
        fresh = world.occurring[g, place]
        fresh.variant, fresh.requests, fresh.readiness = variant, 0, ABSENT
        fresh.cost, fresh.closed = world.truth.variants[world.engines[g].model, variant].bytes, 0
        if where.slot != NO_INDEX:
            fresh.readiness = READY if world.slots[g, where.slot].ready_s == -math.inf else LOADING
        where.local = place
    world.occurring[g, where.local].requests += 1
    return where.local  # type: ignore[no-any-return]


@compiled
def _leave(world: World, g: int, place: int) -> None:
    if place:
        occurring = world.occurring[g, place]
        occurring.requests -= 1
        if occurring.requests == 0:
            world.where[g, occurring.variant].local = NO_INDEX
            engine = world.engines[g]
            if place == engine.occurring - 1:
                engine.occurring -= 1


@compiled
def finish_steps(world: World, g: int, now_s: float, ended: Records) -> int:
    """The step, or the jump, has ended: tokens are generated. Ended requests are put into `ended`; returns
    their number."""
    engine = world.engines[g]
    count = 0
    if engine.steps > 0:
        engine.busy_s += steps_s(engine, engine.steps)
        engine.ticks += engine.steps
        engine.tokens += engine.steps * engine.batch.rows
        engine.batch.context += engine.steps * engine.batch.rows
        engine.steps = 0
        if engine.fills:
            _fill(world, g, now_s)
        i = 0
        while i < engine.running:
            row = world.rows[g, i]
            if row.unfilled == 0 and row.ends_at <= engine.ticks:
                ended[count].request = row.request
                count += 1
                world.outcomes[row.request].end_s = now_s
                _take_out(world, g, i)
                _leave(world, g, row.variant)
                engine.running -= 1
                world.rows[g, i] = world.rows[g, engine.running]
            else:
                i += 1
    return count


@compiled
def _fill(world: World, g: int, now_s: float) -> None:
    """Chunks of prompts are filled; a prompt's last chunk generates the first token."""
    engine = world.engines[g]
    engine.fills = 0
    for i in range(engine.running):
        row = world.rows[g, i]
        if row.unfilled > 0:
            row.unfilled -= row.chunk
            if row.unfilled == 0:
                asked = world.asked[row.request]
                engine.tokens += 1
                engine.reserved -= asked.prompt + row.generated
                _put_in(world, g, i)
                row.ends_at = engine.ticks + asked.output - 1 - row.generated
                if row.generated == 0:
                    world.outcomes[row.request].first_s = now_s


@compiled
def _put_in(world: World, g: int, i: int) -> None:
    """Let a row begin to decode."""
    row = world.rows[g, i]
    asked = world.asked[row.request]
    where = world.where[g, asked.variant]
    variant = world.truth.variants[world.engines[g].model, asked.variant]
    add(world.engines[g].batch, variant, asked.prompt + row.generated + 1.0, where.rows == 0)
    where.rows += 1


@compiled
def _take_out(world: World, g: int, i: int) -> None:
    row = world.rows[g, i]
    asked = world.asked[row.request]
    where = world.where[g, asked.variant]
    where.rows -= 1
    variant = world.truth.variants[world.engines[g].model, asked.variant]
    tokens = asked.prompt + asked.output - float(row.ends_at - world.engines[g].ticks)
    remove(world.engines[g].batch, variant, tokens, where.rows == 0)


@compiled
def next_steps(world: World, rules: Rules, g: int, now_s: float) -> None:
    """Load, preempt, admit, and begin the next steps."""
    engine = world.engines[g]
    _end_loads(world, g, now_s)
    if tokens_held(engine) > world.truth.models[engine.model].kv_tokens:
        _preempt_youngest(world, g)
    while _known(world, g) > 0 and _admit(world, rules, g, now_s):
        pass  # requests that waited for a row that was preempted
    _begin(world, rules, g, now_s)


@compiled
def _known(world: World, g: int) -> int:
    """The number of waiting requests, from the first on, that had arrived when the next step was scheduled.
    If no row is left, no step was scheduled, so all had arrived."""
    engine = world.engines[g]
    known = 0
    while known < engine.waiting and (engine.running == 0 or world.queue[g, known].due <= engine.ticks):
        world.queue[g, known].due = 0
        known += 1
    return known


@compiled
def tokens_held(engine: Records) -> float:
    """Tokens in the KV cache at the end of a step that begins now."""
    return engine.batch.context + engine.reserved + engine.running  # type: ignore[no-any-return]


@compiled
def _admit(world: World, rules: Rules, g: int, now_s: float) -> bool:
    """Apply the policy's decisions. Returns whether a row was preempted, so that others may be admitted
    now."""
    engine = world.engines[g]
    rows, queue = world.rows[g, : engine.running], world.queue[g, : _known(world, g)]
    for i in range(engine.running):
        row = world.rows[g, i]
        row.tokens_left = row.ends_at - engine.ticks if row.unfilled == 0 else 1 << 30
    occurring = world.occurring[g, : max(1, engine.occurring)]
    limit = min(rules.variant_limit, world.truth.models[engine.model].slots)
    admission = policy.Rules(limit, rules.longest_wait_s, rules.almost_done_tokens)
    _decide(now_s, rows, queue, occurring, admission)
    _load(world, g, now_s)
    if _end_loads(world, g, now_s):  # variants that load in no time may run in this step
        _decide(now_s, rows, queue, occurring, admission)
    _read_ahead(world, g, len(queue), now_s)
    before = engine.running
    for i in range(engine.running - 1, -1, -1):
        if world.rows[g, i].preempts:
            _preempt(world, g, i)
    stepped_back = engine.running < before
    _start(world, g)
    return stepped_back  # type: ignore[no-any-return]


@compiled
def _start(world: World, g: int) -> None:
    """Admitted requests become rows while there are rows and KV cache; the others keep their order."""
    engine = world.engines[g]
    model = world.truth.models[engine.model]
    kept, blocked = 0, False
    for i in range(engine.waiting):
        queued = world.queue[g, i]
        asked = world.asked[queued.request]
        tokens = asked.prompt + queued.generated
        room = tokens_held(engine) + tokens + 1 <= model.kv_tokens
        alone = engine.running == 0  # a single request runs, however long it is
        fits = (room or alone) and engine.running < model.max_rows
        admitted = queued.admitted != 0
        blocked = blocked or (admitted and not fits)
        if admitted and not blocked:
            row = world.rows[g, engine.running]
            row.arrival_s, row.key, row.variant = queued.arrival_s, queued.key, queued.variant
            row.parent, row.request, row.generated = queued.parent, queued.request, queued.generated
            row.unfilled, row.chunk, row.preempts = tokens, 0, 0
            engine.running += 1
            engine.reserved += tokens
            if queued.parent != NO_INDEX:
                engine.skips += 1
            engine.clock += 1
            slot = world.where[g, asked.variant].slot
            if slot != NO_INDEX:
                world.slots[g, slot].used = engine.clock
        else:
            world.queue[g, kept] = queued
            kept += 1
    engine.waiting = kept


@compiled
def _preempt(world: World, g: int, i: int) -> None:
    """A row gives its KV cache back and waits again; its generated tokens are filled again with its
    prompt."""
    engine = world.engines[g]
    row = world.rows[g, i]
    asked = world.asked[row.request]
    queued = world.queue[g, engine.waiting]
    queued.arrival_s, queued.key, queued.variant = row.arrival_s, row.key, row.variant
    queued.request, queued.generated, queued.admitted, queued.blocked = row.request, row.generated, 0, 0
    queued.parent, queued.due = NO_INDEX, 0
    if row.unfilled == 0:
        _take_out(world, g, i)
        queued.generated = asked.output - int(row.ends_at - engine.ticks)
    else:
        engine.reserved -= asked.prompt + row.generated
    engine.running -= 1
    world.rows[g, i] = world.rows[g, engine.running]
    engine.waiting += 1
    engine.preemptions += 1
    j = engine.waiting - 1  # in the order of arrival
    while j > 0 and world.queue[g, j - 1].key > world.queue[g, j].key:
        _swap(world, g, j)
        j -= 1


@compiled
def _swap(world: World, g: int, j: int) -> None:
    one, other = world.queue[g, j - 1], world.queue[g, j]
    one.arrival_s, other.arrival_s = other.arrival_s, one.arrival_s
    one.key, other.key = other.key, one.key
    one.parent, other.parent = other.parent, one.parent
    one.variant, other.variant = other.variant, one.variant
    one.admitted, other.admitted = other.admitted, one.admitted
    one.blocked, other.blocked = other.blocked, one.blocked
    one.request, other.request = other.request, one.request
    one.generated, other.generated = other.generated, one.generated
    one.due, other.due = other.due, one.due


@compiled
def _preempt_youngest(world: World, g: int) -> None:
    engine = world.engines[g]
    limit = world.truth.models[engine.model].kv_tokens
    while engine.running > 1 and tokens_held(engine) > limit:
        youngest = 0
        for i in range(engine.running):
            if world.rows[g, i].key > world.rows[g, youngest].key:
                youngest = i
        _preempt(world, g, youngest)


@compiled
def _load(world: World, g: int, now_s: float) -> None:
    """Find slots for the variants that the policy wants to load, in its order."""
    engine = world.engines[g]
    most = 0
    for place in range(1, engine.occurring):
        most = max(most, world.occurring[g, place].load)
    for number in range(1, most + 1):
        for place in range(1, engine.occurring):
            if world.occurring[g, place].load == number and world.occurring[g, place].requests > 0:
                _place(world, g, place, now_s)


@compiled
def _read_ahead(world: World, g: int, known: int, now_s: float) -> None:
    """Read the first blocked request's variant into the host's memory, one variant at a time."""
    engine = world.engines[g]
    if engine.ahead != NO_INDEX and engine.ahead_s <= now_s:
        _keep(world, g, engine.ahead)
        world.seen.held[engine.ahead, g].where = IN_HOST_MEMORY
        engine.ahead = NO_INDEX
    if engine.ahead != NO_INDEX:
        return
    for i in range(known):
        if world.queue[g, i].blocked:
            variant = world.occurring[g, world.queue[g, i].variant].variant
            where = world.where[g, variant]
            if where.slot == NO_INDEX and not where.in_host:
                engine.ahead = variant
                engine.ahead_s = now_s + world.truth.variants[engine.model, variant].fetch_s
            return


@compiled
def _place(world: World, g: int, place: int, now_s: float) -> None:
    for s in range(world.slots.shape[1]):
        slot = world.slots[g, s]
        if slot.variant > 0:
            local = world.where[g, slot.variant].local
            slot.busy = slot.ready_s != -math.inf or (local != NO_INDEX and world.occurring[g, local].active)
    s = slot_for(world.slots[g])
    if s == EMPTY:
        return
    engine, slot = world.engines[g], world.slots[g, s]
    if slot.variant > 0:
        leaving = world.where[g, slot.variant]
        leaving.slot = NO_INDEX
        world.seen.held[slot.variant, g].where = IN_HOST_MEMORY
        if leaving.local != NO_INDEX:
            world.occurring[g, leaving.local].readiness = ABSENT
    occurring = world.occurring[g, place]
    where = world.where[g, occurring.variant]
    variant = world.truth.variants[engine.model, occurring.variant]
    fetch_s = 0.0 if where.in_host else variant.fetch_s
    if engine.ahead == occurring.variant:
        fetch_s = max(0.0, engine.ahead_s - now_s)
        engine.ahead = NO_INDEX
    engine.load_free_s = max(engine.load_free_s, now_s + fetch_s) + variant.load_s
    engine.clock += 1
    slot.variant, slot.used, slot.ready_s = occurring.variant, engine.clock, engine.load_free_s
    where.slot = s
    _keep(world, g, occurring.variant)
    occurring.readiness = LOADING
    world.seen.held[occurring.variant, g].where = ON_ITS_WAY
    engine.loading += 1
    engine.loads += 1


@compiled
def _end_loads(world: World, g: int, now_s: float) -> bool:
    """End the loads that are complete. Returns whether there were any."""
    if world.engines[g].loading == 0:
        return False
    any_ended = False
    for s in range(world.slots.shape[1]):
        slot = world.slots[g, s]
        if slot.variant > 0 and slot.ready_s != -math.inf and slot.ready_s <= now_s:
            slot.ready_s, any_ended = -math.inf, True
            world.engines[g].loading -= 1
            world.seen.held[slot.variant, g].where = IN_SLOT
            local = world.where[g, slot.variant].local
            if local != NO_INDEX:
                world.occurring[g, local].readiness = READY
    return any_ended


@compiled
def _next_load_s(world: World, g: int) -> float:
    first_s = math.inf
    for s in range(world.slots.shape[1]):
        slot = world.slots[g, s]
        if slot.variant > 0 and slot.ready_s != -math.inf:
            first_s = min(first_s, slot.ready_s)
    return first_s


@compiled
def _begin(world: World, rules: Rules, g: int, now_s: float) -> None:
    """Begin the next step, or as many steps as change nothing else."""
    engine = world.engines[g]
    model = world.truth.models[engine.model]
    engine.start_s, engine.fills, engine.growth_s = now_s, 0, 0.0
    tokens = _give_chunks(world, g, max(0, model.batched_tokens - engine.batch.rows))
    if tokens > 0:
        if is_wide(model, tokens + engine.batch.rows):
            added_s = _wide_prompts_s(world, g)
        else:
            added_s = _prompts_s(world, g)
        engine.fills, engine.steps = 1, 1
        engine.step_s = mixed_step_s(model, engine.batch, float(tokens), added_s)
    elif engine.batch.rows > 0:
        engine.step_s = decode_step_s(model, engine.batch)
        engine.growth_s = model.context_s * engine.batch.rows
        engine.steps = _steps_alike(world, rules, g, now_s)
    if engine.steps > 0:
        _schedule(world.next_s, world.winners, g, now_s + steps_s(engine, engine.steps))
    else:
        at_s = _next_load_s(world, g) if engine.loading > 0 else math.inf
        _schedule(world.next_s, world.winners, g, at_s)


@compiled
def _prompts_s(world: World, g: int) -> float:
    """The time that the variants of prompts add to a step."""
    engine, added_s = world.engines[g], 0.0
    for i in range(engine.running):
        row = world.rows[g, i]
        variant = world.truth.variants[engine.model, world.asked[row.request].variant]
        added_s += row.chunk * variant.token_s
    return added_s


@compiled
def _wide_prompts_s(world: World, g: int) -> float:
    """The time that the variants of prompts add to a wide step, including the part that each variant and kind
    without another row adds once."""
    engine, added_s = world.engines[g], 0.0
    model = world.truth.models[engine.model]
    for i in range(engine.running):
        row = world.rows[g, i]
        number = world.asked[row.request].variant
        variant = world.truth.variants[engine.model, number]
        if row.chunk == 0 or variant.kind == BASE_KIND:
            continue
        added_s += row.chunk * variant.wide_token_s
        new, new_kind = world.where[g, number].rows == 0, engine.batch.by_kind[variant.kind] == 0
        for j in range(i):
            other = world.asked[world.rows[g, j].request].variant
            if world.rows[g, j].chunk > 0 and other > 0:
                new = new and other != number
                new_kind = new_kind and world.truth.variants[engine.model, other].kind != variant.kind
        if new:
            added_s += variant.wide_variant_s
        if new_kind:
            added_s += model.wide_launch_s[variant.kind]
    return added_s


@compiled
def _give_chunks(world: World, g: int, left: int) -> int:
    """Divide at most `left` prompt tokens of the next step, in the order of arrival. Returns their number."""
    engine = world.engines[g]
    wanted = 0
    for i in range(engine.running):
        row = world.rows[g, i]
        row.chunk = row.unfilled
        wanted += row.unfilled
    if wanted <= left:
        return wanted
    for i in range(engine.running):
        world.rows[g, i].chunk = 0
    given = 0
    while given < left:
        first = NO_INDEX
        for i in range(engine.running):
            row = world.rows[g, i]
            waits = row.unfilled > 0 and row.chunk == 0
            if waits and (first == NO_INDEX or row.key < world.rows[g, first].key):
                first = i
        row = world.rows[g, first]
        row.chunk = min(row.unfilled, left - given)
        given += row.chunk
    return given


@compiled
def _steps_alike(world: World, rules: Rules, g: int, now_s: float) -> int:
    """The number of steps until something else changes: a row ends, KV cache runs out, a variant is loaded, a
    request that came too late for the first of them may be admitted, or a blocked request loses patience."""
    engine = world.engines[g]
    steps = MANY_STEPS
    for i in range(engine.running):
        row = world.rows[g, i]
        if row.unfilled == 0:
            steps = min(steps, row.ends_at - engine.ticks)
    if engine.running > 1:
        free = world.truth.models[engine.model].kv_tokens - tokens_held(engine)
        steps = min(steps, 1 + int(max(0.0, free) / engine.batch.rows))
    if engine.loading > 0:
        steps = min(steps, steps_within(engine, _next_load_s(world, g) - now_s))
    known = _known(world, g)
    if known < engine.waiting:
        steps = min(steps, world.queue[g, known].due - engine.ticks)
    for i in range(known):
        if world.queue[g, i].blocked:
            left_s = world.queue[g, i].arrival_s + rules.longest_wait_s - now_s
            if left_s >= 0.0:
                steps = min(steps, steps_within(engine, left_s))
                break
    return max(1, steps)
