"""The gateway on virtual time: it counts demand and calls the routing policy. Compiled.

Production's queue (`controlplane.simulation.admitting`) decides about a request that finds no room, or
earlier requests in the queue.
"""

from __future__ import annotations

import numpy as np

from controlplane.baselines.routing.choose import choose
from controlplane.routing import bookkeeping
from controlplane.routing.chance import pair
from controlplane.routing.placements import demand
from controlplane.routing.snapshot import IN_SLOT, promise_class
from controlplane.simulation.engine import enqueue
from controlplane.simulation.world import DONE, SENT, Rules, World
from profiler.compiled import compiled

_sent, _ended, _count = bookkeeping.sent, bookkeeping.ended, demand.count
_set_usable = bookkeeping.set_usable


@compiled
def describe(world: World, rules: Rules, i: int, now_s: float) -> None:
    """Write request i, as the router sees it, into `world.request`."""
    asked, request = world.asked[i], world.request[0]
    request.variant, request.prompt, request.output = asked.variant, asked.prompt, asked.expected
    request.ttft_s, request.tpot_s = asked.ttft_s, asked.tpot_s
    request.waited_s = now_s - asked.arrival_s
    request.session, request.prefix = asked.session, 0
    request.key = pair(np.uint64(rules.seed), np.uint64(i))
    request.promise = promise_class(asked.tpot_s)


@compiled
def arrive(world: World, rules: Rules, now_s: float) -> None:
    """The next request goes at once, or stays among those that the queue has not decided about yet."""
    gateway = world.gateway[0]
    i = gateway.coming
    gateway.coming += 1
    describe(world, rules, i, now_s)
    _count(world.seen, world.state, world.request[0])
    if gateway.length == 0 and dispatch(world, rules, i, now_s):
        gateway.unseen = gateway.coming
    else:
        gateway.length += 1


@compiled
def dispatch(world: World, rules: Rules, i: int, now_s: float) -> bool:
    """Send request i, which `world.request` describes. False if no group has room."""
    gateway = world.gateway[0]
    if gateway.full >= len(world.seen.groups):
        return False
    g = choose(rules.policy, world.seen, world.request[0], world.state)
    if g < 0:
        return False
    outcome, group = world.outcomes[i], world.seen.groups[g]
    variant = world.asked[i].variant
    outcome.group, outcome.sent_s, outcome.state = g, now_s, SENT
    outcome.cold = variant != 0 and world.seen.held[variant, g].where != IN_SLOT
    _sent(world.seen, g, world.request[0])
    if group.batch.rows >= rules.max_ongoing and group.usable:
        _set_usable(world.seen, g, False)
        gateway.full += 1
    enqueue(world, rules, g, i, now_s)
    return True


@compiled
def end(world: World, rules: Rules, i: int, now_s: float) -> None:
    """A request has its answer; waiting requests may be sent."""
    gateway = world.gateway[0]
    describe(world, rules, i, now_s)
    g = world.outcomes[i].group
    _ended(world.seen, g, world.request[0], True)
    world.outcomes[i].state = DONE
    gateway.done += 1
    group = world.seen.groups[g]
    if not group.usable and group.healthy and group.batch.rows < rules.max_ongoing:
        _set_usable(world.seen, g, True)
        gateway.full -= 1


@compiled
def count_room(world: World, rules: Rules) -> None:
    """Count how many more requests can be sent."""
    gateway = world.gateway[0]
    gateway.room = 0
    for g in range(len(world.seen.groups)):
        if world.seen.groups[g].usable:
            gateway.room += rules.max_ongoing - world.seen.groups[g].batch.rows
