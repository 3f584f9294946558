"""A deployment right after `up` waits for the devices to be measured; it is not refused for want of
devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.settings import Settings
from controlplane.state.records import Operation, Phase
from controlplane.state.repository import Repository
from placement.types import Device, Inventory, Unusable
from testkit.controlplane.world import World
from testkit.in_memory import CPU, cancel

pytestmark = pytest.mark.usefixtures("hurry")

STARTING = Unusable("node", "node node has not reported yet, 0.4 s after it joined", starting=True)
WAITS = "waits until the devices of node have been measured"
FAILED = Unusable("node", "the devices of node node could not be measured yet: out of memory")
SMALL = replace(CPU, node="small", total_bytes=1 << 20, free_bytes=1 << 20)


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path) -> World:
    return World(settings, repository, files)


def waits(world: World, deployed: Operation) -> bool:
    """Whether both the deployment and the operation show the reason."""
    state = world.repository.read()
    told = state.operations[deployed.id].record.reason
    return WAITS in told and WAITS in state.deployments["base"].record.groups[0].reason


@pytest.mark.parametrize("others", [(), (SMALL,)], ids=["no other", "one too small"])
async def test_a_deployment_waits_for_a_node_that_is_being_measured(
    world: World, others: tuple[Device, ...]
) -> None:
    world.cluster.devices = Inventory(others, (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: waits(world, deployed))
        waiting = world.repository.read()
        assert not waiting.operations[deployed.id].record.done
        assert not waiting.deployments["base"].record.groups[0].refused_on, "nothing is to make room for it"
        world.cluster.devices = Inventory((*others, CPU))
        assert (await world.end(deployed)).phase is Phase.DEPLOYED


async def test_a_deployment_does_not_wait_for_a_node_with_failed_measurements(world: World) -> None:
    world.cluster.devices = Inventory((), (FAILED,))
    async with world.controlled():
        await world.end(world.register("base"))
        ended = await world.end(world.deploy("base"))
        assert ended.phase is Phase.FAILED
        assert "out of memory" in ended.reason


async def test_a_deployment_ends_when_the_measurement_fails_for_good(world: World) -> None:
    world.cluster.devices = Inventory((), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: waits(world, deployed))
        world.cluster.devices = Inventory((), (FAILED,))
        assert (await world.end(deployed)).phase is Phase.FAILED


async def test_a_waiting_deployment_can_be_cancelled(world: World) -> None:
    world.cluster.devices = Inventory((), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: waits(world, deployed))
        cancel(world.repository, deployed.id)
        assert (await world.end(deployed)).phase is Phase.CANCELLED


async def test_a_refusal_that_no_node_could_change_is_immediate(world: World) -> None:
    world.cluster.devices = Inventory((CPU,), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        ended = await world.end(world.deploy("base", SLOs={"tpot_ms": 1e-6}))
        assert ended.phase is Phase.FAILED
        assert "SLOs.tpot_ms" in ended.reason
