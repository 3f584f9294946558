"""A deployment waits for devices that are still measured, and for the next report of a node that is late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.state.records import Operation, Phase
from placement.types import Device, Inventory, Unusable
from testkit.controlplane.world import World
from testkit.in_memory import CPU, cancel

pytestmark = pytest.mark.usefixtures("hurry")

STARTING = Unusable(
    "node",
    "node node has not reported yet, 0.4 s after it joined",
    awaited="the devices of node have been measured",
)
LATE = Unusable(
    "node", "stale report: the last report of node node was 10.8 s ago", awaited="node node reports again"
)
LOST = Unusable("node", "node node is lost: its last report was 31.0 s ago", lost=True)
FAILED = Unusable("node", "the devices of node node could not be measured yet: out of memory")
SMALL = replace(CPU, node="small", total_bytes=1 << 20, free_bytes=1 << 20)


def waits(world: World, deployed: Operation, node: Unusable) -> bool:
    """Whether both the deployment and the operation show what they wait for."""
    state = world.repository.read()
    reason, told = f"waits until {node.awaited}", state.operations[deployed.id].record.reason
    return reason in told and reason in state.deployments["base"].record.groups[0].reason


@pytest.mark.parametrize("node", [STARTING, LATE], ids=["measured", "late"])
@pytest.mark.parametrize("others", [(), (SMALL,)], ids=["no other", "another is too small"])
async def test_a_deployment_waits_for_a_node_that_soon_has_devices(
    world: World, others: tuple[Device, ...], node: Unusable
) -> None:
    world.cluster.devices = Inventory(others, (node,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: waits(world, deployed, node))
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


@pytest.mark.parametrize(("node", "end"), [(STARTING, FAILED), (LATE, LOST)], ids=["measured", "late"])
async def test_a_deployment_ends_when_the_node_gets_no_devices(
    world: World, node: Unusable, end: Unusable
) -> None:
    world.cluster.devices = Inventory((), (node,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: waits(world, deployed, node))
        world.cluster.devices = Inventory((), (end,))
        ended = await world.end(deployed)
        assert ended.phase is Phase.FAILED
        assert end.reason in ended.reason


async def test_a_waiting_deployment_can_be_cancelled(world: World) -> None:
    world.cluster.devices = Inventory((), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        deployed = world.deploy("base")
        await world.until(lambda: waits(world, deployed, STARTING))
        cancel(world.repository, deployed.id)
        assert (await world.end(deployed)).phase is Phase.CANCELLED


async def test_a_refusal_that_no_node_could_change_is_immediate(world: World) -> None:
    world.cluster.devices = Inventory((CPU,), (STARTING,))
    async with world.controlled():
        await world.end(world.register("base"))
        ended = await world.end(world.deploy("base", SLOs={"tpot_ms": 1e-6}))
        assert ended.phase is Phase.FAILED
        assert "SLOs.tpot_ms" in ended.reason
