"""Memory is promised with a placement, held while it stands, and free again when it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from controlplane.cluster import reservations
from controlplane.controller import launch_action
from controlplane.controller.controller import Controller
from controlplane.controller.metrics import ControllerMetrics
from controlplane.state.records import NodeLedger, Phase, Reservation
from controlplane.state.repository import Put, State
from placement.types import Device, HolderMemory, Inventory, Unusable
from testkit.controlplane.world import World, placed, reserved
from testkit.in_memory import CPU, cancel
from workers.messages import EngineConfig

pytestmark = pytest.mark.usefixtures("hurry")


def state_of(world: World) -> State:
    return world.repository.read()


async def test_memory_is_held_from_the_launch_to_the_end_of_the_engine(world: World) -> None:
    world.cluster.held.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        deploying = world.deploy("base")
        await world.until(lambda: "base" in world.cluster.engines)
        assert reserved(state_of(world)) == placed(state_of(world)) != set()  # the engine does not run yet
        world.cluster.held.clear()
        assert (await world.end(deploying)).phase is Phase.DEPLOYED
        assert reserved(state_of(world)) == placed(state_of(world)) != set()
        assert (await world.end(world.undeploy("base"))).phase is Phase.DELETED
    assert state_of(world).ledgers == {}


async def test_a_launch_that_fails_or_is_cancelled_releases(world: World) -> None:
    world.cluster.broken.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        assert (await world.end(world.deploy("base"))).phase is Phase.FAILED
        assert state_of(world).ledgers == {}
        world.cluster.held.add("base")
        deploying = world.deploy("base")
        await world.until(lambda: state_of(world).ledgers)
        cancel(world.repository, deploying.id)
        assert (await world.end(deploying)).phase is Phase.CANCELLED
    assert state_of(world).ledgers == {}


async def test_a_controller_killed_while_it_launches_leaves_the_reservation_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = world.cluster.launch, asyncio.Event()

    async def hanging(config: EngineConfig) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(world.cluster, "launch", hanging)
    async with world.controlled():
        await world.end(world.register("base"))
        deploying = world.deploy("base")
        await begun.wait()
    kept = reserved(state_of(world))
    assert kept == placed(state_of(world)) != set()
    assert not world.cluster.engines
    monkeypatch.setattr(world.cluster, "launch", real)
    async with world.controlled():
        assert (await world.end(deploying)).phase is Phase.DEPLOYED
    assert reserved(state_of(world)) == kept


async def test_the_second_of_two_deployments_gets_what_the_first_left(world: World) -> None:
    """The device has room for one of them and a half."""
    async with world.controlled():
        device, taken = await tight(world)
        world.cluster.devices = Inventory((device,))
        ends = [await world.end(o) for o in [world.deploy(name) for name in ("one", "two")]]
        assert sorted(e.phase for e in ends) == [Phase.DEPLOYED, Phase.FAILED]
        (failed,) = (e for e in ends if e.phase is Phase.FAILED)
        assert failed.error is not None
        assert failed.error["error"]["code"] == "no_feasible_plan"
        (held,) = reserved(state_of(world))
        assert held[-1] == taken
        # Undeploying the first makes room for the second.
        await world.end(world.undeploy(held[0]))
        assert (await world.end(world.deploy(failed.target))).phase is Phase.DEPLOYED


async def tight(world: World) -> tuple[Device, int]:
    """A device with room for one base, "one", that was undeployed just now, and what it had taken."""
    for name in ("one", "two"):
        await world.end(world.register(name, folder="base"))
    await world.end(world.deploy("one"))
    (taken,) = {r[-1] for r in reserved(state_of(world))}
    await world.end(world.undeploy("one"))
    size = int(taken * 1.5 / (1 - world.settings.headroom))
    return replace(CPU, total_bytes=size, free_bytes=size), taken


@pytest.mark.parametrize("samples", [1, 3])
async def test_memory_that_a_stopped_engine_gives_back_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    """The nodes' samples are older than the stop, and processes end a while after it."""
    async with world.controlled():
        device, taken = await tight(world)
        full = replace(device, free_bytes=device.free_bytes - taken, uses=(HolderMemory("one", taken),))
        seen = [Inventory((full,))] * samples + [Inventory((device,))]

        async def inventory() -> Inventory:
            return seen.pop(0) if len(seen) > 1 else seen[0]

        monkeypatch.setattr(world.cluster, "inventory", inventory)
        assert (await world.end(world.deploy("two"))).phase is Phase.DEPLOYED


@pytest.mark.parametrize("holder", ["one", "", None])
async def test_memory_that_is_not_given_back_is_not_placed_on(
    world: World, monkeypatch: pytest.MonkeyPatch, holder: str | None
) -> None:
    monkeypatch.setattr(launch_action, "RECLAIM_WAIT_S", 0.05)
    async with world.controlled():
        device, taken = await tight(world)
        full = replace(device, free_bytes=device.free_bytes - taken, uses=(HolderMemory(holder, taken),))
        world.cluster.devices = Inventory((full,))
        failed = await world.end(world.deploy("two"))
        assert failed.error is not None
        assert failed.error["error"]["code"] == "no_feasible_plan"
        assert world.cluster.launches == ["one"]


async def test_an_engine_that_takes_more_than_it_was_promised_leaves_less(world: World) -> None:
    async with world.controlled():
        await world.up()
        await world.end(world.register("other", folder="base"))
        everything = HolderMemory("base", CPU.total_bytes)
        world.cluster.devices = Inventory((replace(CPU, free_bytes=0, uses=(everything,)),))
        failed = await world.end(world.deploy("other"))
    assert failed.phase is Phase.FAILED
    assert {r[0] for r in reserved(state_of(world))} == {"base"}


async def test_orphans_are_released(world: World) -> None:
    """A controller of another version, or a restored backup, may leave such records."""
    orphan = Reservation("gone", 5, 0, "cpu", 0, CPU.total_bytes, 0.0)
    world.repository.commit([Put(NodeLedger("node", (orphan,)), 0)])
    async with world.controlled():
        await world.until(lambda: not state_of(world).ledgers)
        await world.up()
    assert reservations.orphans(state_of(world)) == []


async def test_metrics_of_devices_follow_the_cluster(world: World) -> None:
    registry = CollectorRegistry()

    def memory(state: str, node: str = "node") -> float | None:
        labels = {"node": node, "device": "cpu:0", "state": state}
        return registry.get_sample_value("ostinato_device_memory_bytes", labels)

    async with world.controlled():
        await world.up()
    controller = Controller(world.settings, world.repository, world.cluster, ControllerMetrics(registry))
    await controller.step()
    await controller.settle()
    (held,) = reserved(state_of(world))
    headroom = int(CPU.total_bytes * world.settings.headroom)
    assert (memory("total"), memory("used"), memory("reserved")) == (CPU.total_bytes, 0, held[-1])
    assert memory("free") == CPU.total_bytes - headroom - held[-1]
    assert registry.get_sample_value("ostinato_node_usable", {"node": "node"}) == 1
    world.cluster.devices = Inventory(
        (), (Unusable("node", "stale report: the last report of node node", lost=False),)
    )
    await controller.step()
    await controller.settle()
    assert memory("total") is None
    assert registry.get_sample_value("ostinato_node_usable", {"node": "node"}) == 0
    assert registry.get_sample_value("ostinato_node_report_age_seconds", {"node": "node"}) == 9.0
