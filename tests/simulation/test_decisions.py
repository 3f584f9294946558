"""The simulator's decisions are the routing policies' own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from controlplane.baselines.routing.choose import POLICIES, choose
from controlplane.routing.chance import pair
from controlplane.routing.snapshot import NO_PROMISE, REQUEST, Snapshot
from controlplane.routing.state import RouterState
from controlplane.simulation.run import run
from controlplane.simulation.world import World, room_for_ended
from profiler.compiled import records
from testkit.simulation import worlds
from testkit.simulation.stepwise import Asked, Machine

COUNT, VARIANTS = 60, 6
MACHINE = Machine(
    row_s=(0.0, *(1e-3,) * VARIANTS), prompt_s=(0.0,) * (VARIANTS + 1), load_s=(0.0, *(0.05,) * VARIANTS)
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_goes_where_the_policy_sends_it(policy: str) -> None:
    rng = np.random.default_rng(7)
    arrivals = np.sort(rng.uniform(0, 2, COUNT))
    lengths, variants = rng.integers(1, 60, (COUNT, 2)), rng.integers(0, VARIANTS + 1, COUNT)
    requests = [
        Asked(float(at_s), int(prompt), int(output), int(variant))
        for at_s, (prompt, output), variant in zip(arrivals, lengths, variants, strict=True)
    ]
    world, rules = worlds.new(MACHINE, requests, groups=4), worlds.rules(policy)._replace(tick_s=1e6)
    ended, found = room_for_ended(world), set()
    for i, asked in enumerate(requests):
        run(world, rules, float(np.nextafter(asked.arrival_s, -math.inf)), ended)
        expected = directly(world, policy, i, rules.seed)
        run(world, rules, asked.arrival_s, ended)
        assert world.outcomes.group[i] == expected
        found.add(expected)
    assert len(found) > 1


def directly(world: World, policy: str, i: int, seed: int) -> int:
    snapshot = Snapshot(*(part.copy() for part in world.seen))
    state = RouterState(*(part.copy() for part in world.state))
    asked, request = world.asked[i], records(REQUEST, 1)[0]
    request.variant, request.prompt, request.output = asked.variant, asked.prompt, asked.expected
    request.ttft_s = request.tpot_s = math.inf
    request.promise = NO_PROMISE
    request.key = pair(np.uint64(seed), np.uint64(i))
    return int(choose(POLICIES.index(policy), snapshot, request, state))
