"""The simulation: events in the order of virtual time. Compiled, deterministic."""

from __future__ import annotations

import math

from controlplane.routing.placements import tick as placements
from controlplane.simulation.engine import finish_steps, next_steps
from controlplane.simulation.gateway import advance_line, arrive, end
from controlplane.simulation.world import Rules, World
from profiler.compiled import Records, compiled
from profiler.step_time.correction import corrected

_tick = placements.tick


@compiled
def run(world: World, rules: Rules, until_s: float, ended: Records) -> float:
    """All requests until `until_s`, or to the last answer. `ended` is room for as many records as an engine
    has
    rows. The virtual time at the end."""
    now_s, coming, count = 0.0, 0, len(world.asked)
    next_tick_s = rules.tick_s
    while True:
        g, engine_s = soonest(world.engines)
        arrival_s = world.asked[coming].arrival_s if coming < count else math.inf
        event_s = min(engine_s, arrival_s)
        if event_s == math.inf or event_s > until_s:
            return now_s
        while next_tick_s <= event_s:
            _tick(world.seen, world.state, rules.policy, next_tick_s)
            next_tick_s += rules.tick_s
        now_s = event_s
        if arrival_s <= engine_s:
            arrive(world, rules, coming, now_s)
            coming += 1
        else:
            step(world, rules, g, now_s, ended)


@compiled
def soonest(engines: Records) -> tuple[int, float]:
    best, first_s = 0, engines[0].next_s
    for g in range(1, len(engines)):
        if engines[g].next_s < first_s:
            best, first_s = g, engines[g].next_s
    return best, first_s


@compiled
def step(world: World, rules: Rules, g: int, now_s: float, ended: Records) -> None:
    """An engine's steps have ended: answers go out, the line moves on, the next steps begin."""
    engine, group = world.engines[g], world.seen.groups[g]
    if engine.steps > 0:  # what the worker observed of its steps
        seconds = engine.steps * engine.step_s
        group.correction = corrected(group.correction, seconds, group.tpot_s, engine.steps)
    done = finish_steps(world, g, now_s, ended)
    for i in range(done):
        end(world, rules, ended[i].request, now_s)
    if done > 0 and world.gateway[0].length > 0:
        advance_line(world, rules, now_s)
    next_steps(world, rules, g, now_s)
    report(world, g)


@compiled
def report(world: World, g: int) -> None:
    """What the router learns of a group: prompts to fill, and where its variants are."""
    engine, group = world.engines[g], world.seen.groups[g]
    unfilled = 0.0
    for i in range(engine.running):
        unfilled += world.rows[g, i].unfilled
    for i in range(engine.waiting):
        unfilled += world.asked[world.queue[g, i].request].prompt
    group.unfilled = unfilled
