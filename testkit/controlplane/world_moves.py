"""Rebalancing of a `World`: what is proposed, and how a move begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controlplane.api.services import fresh_context
from controlplane.management.commands import deploy_model
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning import rebalancing
from controlplane.state.records import Deployment, Phase
from controlplane.state.repository import Put
from placement.rebalancing import Proposal
from placement.types import Inventory
from testkit.controlplane.world import NODES, World
from testkit.controlplane.world_groups import base_of


def fill(world: World, *free: int) -> None:
    """Set each node's bytes that are free for newcomers."""
    devices = tuple(replace(d, free_bytes=n) for d, n in zip(NODES.devices, free, strict=True))
    world.cluster.devices = Inventory(devices)


async def apart(world: World) -> None:
    """A base on one node, another on the other, which had no room for both."""
    await world.end(world.register("base"))
    await world.end(world.register("second", folder="base"))
    assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
    world.cluster.devices = Inventory((replace(NODES.devices[0], free_bytes=0), NODES.devices[1]))
    assert (await world.end(world.deploy("second"))).phase is Phase.DEPLOYED
    world.cluster.devices = NODES


def proposed(world: World) -> Proposal:
    found = rebalancing.propose(world.repository.read(), world.cluster.devices, world.settings)
    assert found.goal == "free a device"
    assert found.proposal is not None
    return found.proposal


def begin(world: World, proposal: Proposal) -> None:
    world.repository.commit(rebalancing.begun(world.repository.read(), proposal))


def needs(world: World) -> int:
    """Bytes that the base was promised."""
    placement = base_of(world).placement
    assert placement is not None
    return sum(rank.memory_bytes for rank in placement.ranks)


def wanted(world: World, name: str, options: dict[str, Any]) -> Deployment:
    """The deployment that this would be."""
    request = DeployModelRequest.model_validate({"model": name, **options})
    changes = deploy_model(world.repository.read(), request, fresh_context()).changes
    (found,) = (c.record for c in changes if isinstance(c, Put) and isinstance(c.record, Deployment))
    return found
