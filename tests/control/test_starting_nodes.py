"""Who deploys right after `up` waits for the devices to be measured, instead of being told to add one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from in_memory import CPU, cancel
from world import World

from controlplane.planning import rescheduling
from controlplane.settings import Settings
from controlplane.state.records import Phase
from controlplane.state.repository import Repository
from placement.types import Device, Inventory, Unusable

pytestmark = pytest.mark.usefixtures("hurry")

MEASURED = "the devices of node node are being measured"
STARTING = Unusable("node", MEASURED, starting=True)
FAILED = Unusable("node", "the devices of node node could not be measured yet: out of memory")
SMALL = replace(CPU, node="small", total_bytes=1 << 20, free_bytes=1 << 20)


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(rescheduling, "NO_ROOM_S", 0.05)
    return World(settings, repository, files)


@pytest.mark.parametrize("others", [(), (SMALL,)], ids=["no other", "one too small"])
async def test_it_waits_for_a_node_that_is_being_measured(world: World, others: tuple[Device, ...]) -> None:
    world.cluster.devices = Inventory(others, (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: world.repository.read().deployments["base"].record.groups[0].refused_on)
        waiting = world.repository.read()
        assert MEASURED in waiting.deployments["base"].record.groups[0].reason
        await world.until(lambda: MEASURED in world.repository.read().operations[deployed.id].record.reason)
        assert not waiting.operations[deployed.id].record.done
        world.cluster.devices = Inventory((*others, CPU))
        assert (await world.end(deployed)).phase is Phase.DEPLOYED


async def test_it_does_not_wait_for_a_node_whose_measuring_failed(world: World) -> None:
    world.cluster.devices = Inventory((), (FAILED,))
    async with world.controlled():
        await world.end(world.register("base"))
        ended = await world.end(world.deploy("base"))
        assert ended.phase is Phase.FAILED
        assert "out of memory" in ended.reason


async def test_it_ends_when_the_measuring_fails_at_last(world: World) -> None:
    world.cluster.devices = Inventory((), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: world.repository.read().deployments["base"].record.groups[0].refused_on)
        world.cluster.devices = Inventory((), (FAILED,))
        assert (await world.end(deployed)).phase is Phase.FAILED


async def test_one_that_waits_can_be_cancelled(world: World) -> None:
    world.cluster.devices = Inventory((), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: world.repository.read().deployments["base"].record.groups[0].refused_on)
        cancel(world.repository, deployed.id)
        assert (await world.end(deployed)).phase is Phase.CANCELLED
