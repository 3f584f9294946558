"""The simulation: events in the order of virtual time, deterministic.

The work for each request and step is compiled. Only while requests wait, because no group has room, control
returns to Python, because production's queue decides about them (`controlplane.simulation.admitting`).
"""

from __future__ import annotations

import math

import numpy as np

from controlplane.baselines.routing import tick as placements
from controlplane.routing import bookkeeping
from controlplane.simulation.admitting import Admitting, admit_all
from controlplane.simulation.engine import finish_steps, next_steps, steps_s
from controlplane.simulation.gateway import arrive, count_room, describe, dispatch, end
from controlplane.simulation.world import NO_INDEX, Rules, World
from profiler.compiled import Records, compiled
from profiler.step_time.correction import corrected

_tick, _cached = placements.tick, bookkeeping.cached

# Why the compiled part returns. PAUSED: there is no event left before `until_s`. ROOM: there is room for
# waiting requests. ASTRAY: a policy found no group for a request although there was room.
PAUSED, ROOM, ASTRAY = range(3)


class NoGroup(RuntimeError):
    """A policy chose no group although one has room."""


def run(
    world: World, rules: Rules, until_s: float, ended: Records, admitting: Admitting | None = None
) -> float:
    """Run all events until `until_s`, or to the last answer. Returns the virtual time at the end.

    `ended` has room for as many records as an engine has rows. Without `admitting` no request is refused, and
    all wait in one queue. A later call with the same world and the same `admitting` continues. Raises
    NoGroup.
    """
    admitting = admitting or admit_all(world)
    passing = np.zeros(len(ended), np.int32)
    count, why = 0, ROOM
    while why == ROOM:
        why = advance(world, rules, until_s, ended, passing, count)
        count = admitting.catch_up(passing if why == ROOM else passing[:0])
    if why == ASTRAY:
        raise NoGroup(f"policy {rules.policy} chose no group though one has room")
    return float(world.gateway.now_s[0])


@compiled
def next_events_s(world: World) -> tuple[float, float]:
    """When the next engine's steps end, and when the next request comes. Infinite: never."""
    coming, arrival_s = world.gateway[0].coming, math.inf
    if coming < len(world.asked):
        arrival_s = world.asked[coming].arrival_s
    return world.next_s[world.winners[1]], arrival_s


@compiled
def advance(world: World, rules: Rules, until_s: float, ended: Records, passing: Records, count: int) -> int:
    """Send the first `count` of `passing`, then continue. Returns the reason why it stopped."""
    gateway = world.gateway[0]
    for k in range(count):
        describe(world, rules, passing[k], gateway.now_s)
        if not dispatch(world, rules, passing[k], gateway.now_s):
            return ASTRAY
    if gateway.stepping != NO_INDEX:
        _begin_steps(world, rules, gateway.stepping)
        gateway.stepping = NO_INDEX
    while True:
        g = world.winners[1]
        engine_s, arrival_s = next_events_s(world)
        event_s = min(engine_s, arrival_s)
        if event_s == math.inf or event_s > until_s:
            return PAUSED
        _tick_until(world, rules, event_s)
        gateway.now_s = event_s
        if arrival_s <= engine_s:
            arrive(world, rules, event_s)
        elif _end_steps(world, rules, g, ended) > 0 and gateway.length > 0:
            gateway.stepping = g
            count_room(world, rules)
            return ROOM
        else:
            _begin_steps(world, rules, g)


@compiled
def _tick_until(world: World, rules: Rules, event_s: float) -> None:
    gateway = world.gateway[0]
    while gateway.next_tick_s + rules.tick_s <= event_s:
        gateway.next_tick_s += rules.tick_s
        _tick(world.seen, world.state, rules.policy, gateway.next_tick_s)


@compiled
def _end_steps(world: World, rules: Rules, g: int, ended: Records) -> int:
    """Process the end of an engine's steps, and send its answers. Returns their number."""
    engine, group, now_s = world.engines[g], world.seen.groups[g], world.gateway[0].now_s
    if engine.steps > 0:  # the worker's observation of its steps
        seconds = steps_s(engine, engine.steps)
        group.correction = corrected(group.correction, seconds, group.tpot_s, engine.steps)
    done = finish_steps(world, g, now_s, ended)
    for k in range(done):
        end(world, rules, ended[k].request, now_s)
    return done


@compiled
def _begin_steps(world: World, rules: Rules, g: int) -> None:
    next_steps(world, rules, g, world.gateway[0].now_s)
    report(world, g)


@compiled
def report(world: World, g: int) -> None:
    """What the router learns about a group: prompts to fill, and where its variants are."""
    engine, group = world.engines[g], world.seen.groups[g]
    unfilled = 0.0
    for i in range(engine.running):
        unfilled += world.rows[g, i].unfilled
    for i in range(engine.waiting):
        unfilled += world.asked[world.queue[g, i].request].prompt
    group.unfilled = unfilled
    waiting = 0.0
    for i in range(engine.waiting):
        waiting += world.asked[world.queue[g, i].request].prompt
    _cached(world.seen, g, engine.batch.context + engine.reserved + waiting)
