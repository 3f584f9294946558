"""Engines of several models that share GPUs, on virtual time. Compiled.

An engine is the simulator's own (`controlplane.simulation.engine`). What is added: engines whose steps run on
the same GPU share it. A step takes as much longer as others keep the busiest of its GPUs busy when it begins:
of two that never rest each goes at half its speed. A pipeline with fewer batches than stages keeps each GPU
busy for a part of its step only (`occupancy`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.simulation import agenda
from controlplane.simulation.engine import enqueue, finish_steps, next_steps, steps_s
from controlplane.simulation.run import next_events_s
from controlplane.simulation.world import DONE, REFUSED, SENT, Rules, World
from profiler.compiled import Records, compiled

NO_MODEL = -1
_schedule = agenda.schedule


class Devices(NamedTuple):
    """G engines on D GPUs. `serves` [G]: the model of each, NO_MODEL before it is deployed; `on` [G, D]: 1
    where it has a rank; `occupancy` [G, rows + 1]: the share of a step in which its GPUs are busy; `models`
    [N]: which one each request asks. `drawn` [G] and `weight` [D]: what engines draw now; `busy_s` [D] up to
    `since_s` [D]."""

    serves: Records
    on: Records
    occupancy: Records
    models: Records
    drawn: Records
    weight: Records
    busy_s: Records
    since_s: Records


def new_devices(engines: int, devices: int, models: Records) -> Devices:
    """Nothing is deployed yet."""
    rows = 1 + 512
    serves: Records = np.full(engines, NO_MODEL, np.int64)
    on, occupancy = np.zeros((engines, devices), np.uint8), np.ones((engines, rows))
    drawn, weight = np.zeros(engines), np.zeros(devices)
    return Devices(serves, on, occupancy, models, drawn, weight, np.zeros(devices), np.zeros(devices))


@compiled
def play(world: World, rules: Rules, devices: Devices, until_s: float, ended: Records) -> float:
    """All that happens until `until_s`; the time of the last of it. A request goes to the engine of its model
    with the fewest, and is refused where none has it."""
    gateway = world.gateway[0]
    while True:
        g = world.winners[1]
        engine_s, arrival_s = next_events_s(world)
        event_s = min(engine_s, arrival_s)
        if event_s == np.inf or event_s > until_s:
            return gateway.now_s  # type: ignore[no-any-return]
        gateway.now_s = event_s
        if arrival_s <= engine_s:
            _arrive(world, rules, devices, event_s)
        else:
            _draw(devices, g, 0.0, event_s)
            for k in range(finish_steps(world, g, event_s, ended)):
                world.outcomes[ended[k].request].state = DONE
                gateway.done += 1
            next_steps(world, rules, g, event_s)
            if world.engines[g].steps > 0:
                _share(world, devices, g, event_s)


@compiled
def _arrive(world: World, rules: Rules, devices: Devices, now_s: float) -> None:
    i = world.gateway[0].coming
    world.gateway[0].coming += 1
    chosen, fewest = NO_MODEL, 0
    for g in range(len(devices.serves)):
        if devices.serves[g] == devices.models[i]:
            requests = world.engines[g].running + world.engines[g].waiting
            if chosen == NO_MODEL or requests < fewest:
                chosen, fewest = g, requests
    outcome = world.outcomes[i]
    if chosen == NO_MODEL:
        outcome.state = REFUSED
        return
    outcome.group, outcome.sent_s, outcome.state = chosen, now_s, SENT
    enqueue(world, rules, chosen, i, now_s)


@compiled
def _share(world: World, devices: Devices, g: int, now_s: float) -> None:
    """The steps that have just begun, among those of others on the same GPUs."""
    engine = world.engines[g]
    others, has_company = 0.0, False
    for d in range(devices.on.shape[1]):
        if devices.on[g, d]:
            others = max(others, devices.weight[d])
            for h in range(len(devices.serves)):
                has_company = has_company or (h != g and devices.serves[h] != NO_MODEL and devices.on[h, d])
    _draw(devices, g, devices.occupancy[g, engine.running], now_s)
    if has_company:  # one step at a time: others may come and go
        engine.step_s *= 1.0 + others
        engine.growth_s, engine.steps = 0.0, 1
        _schedule(world.next_s, world.winners, g, now_s + steps_s(engine, 1))


@compiled
def _draw(devices: Devices, g: int, weight: float, now_s: float) -> None:
    """From now on the engine keeps its GPUs busy so much."""
    for d in range(devices.on.shape[1]):
        if devices.on[g, d]:
            settle(devices, d, now_s)
            devices.weight[d] = max(0.0, devices.weight[d] + weight - devices.drawn[g])
    devices.drawn[g] = weight


@compiled
def settle(devices: Devices, d: int, now_s: float) -> None:
    """Count a GPU's busy time up to now."""
    devices.busy_s[d] += (now_s - devices.since_s[d]) * min(1.0, devices.weight[d])
    devices.since_s[d] = now_s
