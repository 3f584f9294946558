"""Worker groups of the deployments of a `World`."""

from __future__ import annotations

from typing import Any

from controlplane.state.records import Deployment, Phase
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from testkit.controlplane.world import World

APART = {"antiAffinity": {"group": "g", "scope": "node"}}
TWO = {"replicas": {"min": 2, "max": 2}}


def base_of(world: World) -> Deployment:
    return world.repository.read().deployments["base"].record


def nodes_of(deployment: Deployment) -> dict[str, set[str]]:
    """Where the ranks of each placed group are."""
    return {
        name: {rank.node for rank in group.placement.ranks}
        for name, group in zip(deployment.group_ids(), deployment.groups, strict=True)
        if group.placement
    }


def group(world: World, number: int) -> WorkerGroup:
    found = base_of(world).group(number)
    assert found is not None
    return found


async def until_serving(world: World, count: int) -> None:
    await world.until(lambda: sum(g.phase is GroupPhase.SERVING for g in base_of(world).groups) == count)


async def two_groups(world: World, **options: Any) -> None:
    await world.end(world.register("base"))
    await world.end(world.register("v1", "base"))
    assert (await world.end(world.deploy("base", **TWO, **options))).phase is Phase.DEPLOYED
    await until_serving(world, 2)
