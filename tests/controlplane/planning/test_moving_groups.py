"""Rebalancing on a real store: what is proposed on the records, and how a move goes and may fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane import errors
from controlplane.planning import rebalancing
from controlplane.state.records import Phase
from controlplane.state.worker_groups import GroupPhase
from controlplane.traffic.route_table import build_table
from placement.types import Inventory
from testkit.controlplane.world import World, placed, reserved
from testkit.controlplane.world_groups import base_of, nodes_of
from testkit.controlplane.world_moves import apart, begin, fill, needs, proposed, wanted
from testkit.in_memory import CPU

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.mark.usefixtures("quick")
async def test_a_move_starts_the_new_group_before_the_old_one_goes(world: World) -> None:
    async with world.controlled():
        await apart(world)
        where = {name: nodes_of(d.record) for name, d in world.repository.read().deployments.items()}
        assert where == {"base": {"base": {"node"}}, "second": {"second": {"other"}}}
        proposal = proposed(world)
        (move,) = proposal.moves
        base = move.tenant.name
        assert proposal.freed is not None
        assert proposal.freed.node == ("node" if base == "base" else "other")
        assert move.tenant.load_bytes > 0
        world.cluster.held.add(f"{base}@1")
        begin(world, proposal)
        await world.until(lambda: f"{base}@1" in world.cluster.engines)
        with pytest.raises(errors.NotReady):
            rebalancing.propose(world.repository.read(), world.cluster.devices, world.settings)
        assert build_table(world.repository.read()).groups[base] == (base,)
        assert {holder for holder, *_ in reserved(world.repository.read())} == {"base", "second", f"{base}@1"}
        world.cluster.held.clear()
        served: set[tuple[str, ...]] = set()

        def moved() -> bool:
            state = world.repository.read()
            served.add(build_table(state).groups.get(base, ()))
            return state.deployments[base].record.group_ids() == (f"{base}@1",)

        await world.until(moved)
        assert () not in served  # a group answered at every moment
        await world.until(lambda: set(world.cluster.engines) == {"base", "second", f"{base}@1"} - {base})
        state = world.repository.read()
        assert reserved(state) == placed(state)
        assert {n for d in state.deployments.values() for ns in nodes_of(d.record).values() for n in ns} == {
            move.placement.ranks[0].node
        }
        last = rebalancing.propose(state, world.cluster.devices, world.settings)
        assert last.proposal is None  # one node carries both: nothing is left to gain


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("trouble", ["no room", "no start"])
async def test_a_move_that_fails_leaves_the_group_where_it_is(world: World, trouble: str) -> None:
    async with world.controlled():
        await apart(world)
        proposal = proposed(world)
        base = proposal.moves[0].tenant.name
        if trouble == "no room":
            fill(world, 0, 0)
        else:
            world.cluster.broken.add(base)
        begin(world, proposal)
        await world.until(lambda: len(world.repository.read().deployments[base].record.groups) == 2)
        await world.until(lambda: len(world.repository.read().deployments[base].record.groups) == 1)
        await world.until(lambda: set(world.cluster.engines) == {"base", "second"})
        found = world.repository.read().deployments[base].record
        assert [(g.number, g.phase) for g in found.groups] == [(0, GroupPhase.SERVING)]
        assert (found.phase, found.reason) == (Phase.DEPLOYED, "")


@pytest.mark.usefixtures("quick")
async def test_room_is_made_for_a_newcomer(world: World) -> None:
    """It must not share the node of `second`, and the other one is full of `base`, which could go."""
    options: dict[str, Any] = {"antiAffinity": {"group": "g", "scope": "node"}}
    async with world.controlled():
        for name in ("base", "second", "third"):
            await world.end(world.register(name, folder="base"))
        await world.end(world.deploy("base"))
        size = needs(world)
        shares = {"node": 1.6, "other": 2.7}
        sizes = {name: int(share * size) for name, share in shares.items()}
        world.cluster.devices = Inventory(
            tuple(replace(CPU, node=n, total_bytes=size, free_bytes=size) for n, size in sizes.items())
        )
        assert (await world.end(world.deploy("second", **options))).phase is Phase.DEPLOYED
        newcomer = wanted(world, "third", options)
        refused = await world.end(world.deploy("third", **options))
        assert refused.error is not None
        assert refused.error["error"]["code"] == "no_feasible_plan"
        found = rebalancing.propose(
            world.repository.read(), world.cluster.devices, world.settings, newcomer
        ).proposal
        assert found is not None
        assert [(m.tenant.name, m.placement.ranks[0].node) for m in found.moves] == [("base", "other")]
        assert found.newcomer is not None
        assert found.newcomer.ranks[0].node == "node"
        begin(world, found)
        await world.until(lambda: base_of(world).group_ids() == ("base@1",))
        assert (await world.end(world.deploy("third", **options))).phase is Phase.DEPLOYED
        state = world.repository.read()
        assert reserved(state) == placed(state)
        assert nodes_of(state.deployments["third"].record) == {"third": {"node"}}
