"""Which deployments wait for a measurement to end, which do not, and that every waiting deployment is
served."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.api import preview
from controlplane.api.services import fresh_context
from controlplane.cluster import reservations as ledger
from controlplane.controller import profile_actions
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning import placement_decision as deploying
from controlplane.planning import rebalancing, reclaimable_memory
from controlplane.profiling import progress
from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.records import NodeLedger, Operation, Phase, Reservation
from controlplane.state.worker_groups import GroupPhase
from placement.types import DeviceKey, HolderMemory, Inventory
from testkit.controlplane.builders import deployment, ready_base, state
from testkit.controlplane.world import World
from testkit.controlplane.world_measuring import (
    ROOMIER,
    TIGHT,
    asked,
    known,
    measured_world,
    measuring,
    on,
    profile,
    waiting,
)
from testkit.controlplane.world_reservations import cluster, reservations
from testkit.in_memory import GIB, cancel
from testkit.measured_cluster import HOST
from workers.measuring.request import MeasureRequest
from workers.messages import EngineConfig

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def world(settings: Settings, store: StateStore, tmp_path: Path) -> World:
    return measured_world(settings, store, tmp_path / "files", "one", "two", "three")


async def engine_waits(world: World) -> tuple[Operation, Operation]:
    """The registration of "two", which is measured, and the deployment of "one", which waits for that."""
    await known(world, "one")
    on(world, TIGHT)
    second = await measuring(world, "two")
    deploying = world.deploy("one")
    await world.until(lambda: "waits until" in asked(world, deploying).reason)
    return second, deploying


# --- profiles that wait for each other --------------------------------------------------------------


async def test_two_architectures_are_measured_one_after_the_other(world: World) -> None:
    async with world.controlled():
        first = await measuring(world, "one")
        second = await waiting(world, "two", "until the architecture of 'one'")
        told = profile(world, "two")
        assert told is not None
        assert (told.phase, told.attempts, told.reason) == (Phase.PENDING, 0, asked(world, second).reason)
        assert asked(world, second).phase is Phase.PROFILING
        assert len(reservations(world)) == 1
        cluster(world).go.set()
        assert {(await world.end(one)).phase for one in (first, second)} == {Phase.READY}
    assert cluster(world).most == 1
    for name in ("one", "two"):
        found = profile(world, name)
        assert found is not None
        assert progress.is_whole(found)


async def test_the_oldest_goes_first(world: World) -> None:
    async with world.controlled():
        operations = [await measuring(world, "one")]
        for name in ("two", "three"):
            operations.append(await waiting(world, name, "until the architecture of"))
        cluster(world).go.set()
        for operation in operations:
            assert (await world.end(operation)).phase is Phase.READY
    assert cluster(world).most == 1
    folders = [order.folder.name for order in cluster(world).orders]
    assert folders == ["one", "two", "three"]


async def test_another_device_is_used_meanwhile(world: World) -> None:
    on(world, HOST, replace(HOST, node="other"))
    async with world.controlled():
        operations = [await measuring(world, "one")]
        operations.append(world.register("two"))
        await world.until(lambda: len(cluster(world).running) == 2)
        operations.append(await waiting(world, "three", "until the architecture of"))
        cluster(world).go.set()
        for operation in operations:
            assert (await world.end(operation)).phase is Phase.READY
    assert cluster(world).most == 1


async def test_a_waiting_deployment_can_be_cancelled(world: World) -> None:
    async with world.controlled():
        first = await measuring(world, "one")
        second = await waiting(world, "two", "until the architecture of 'one'")
        key = profile(world, "two")
        assert key is not None
        cancel(world.repository, second.id)
        assert (await world.end(second)).phase is Phase.CANCELLED
        await world.until(lambda: world.repository.read().profiles[key.key].record.phase is Phase.CANCELLED)
        assert asked(world, first).phase is Phase.PROFILING
        cluster(world).go.set()
        assert (await world.end(first)).phase is Phase.READY
    assert len(cluster(world).orders) == 1


async def test_a_controller_that_is_killed_leaves_the_order_to_its_successor(world: World) -> None:
    async with world.controlled():
        operations = [await measuring(world, "one"), await waiting(world, "two", "of 'one'")]
    assert len(reservations(world)) == 1
    async with world.controlled():
        await world.until(lambda: len(cluster(world).orders) == 2)
        assert asked(world, operations[1]).phase is Phase.PROFILING
        cluster(world).go.set()
        for operation in operations:
            assert (await world.end(operation)).phase is Phase.READY
    assert [order.folder.name for order in cluster(world).orders] == ["one", "one", "two"]


async def test_memory_that_the_first_gives_back_slowly_does_not_fail_the_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen for three samples after the end, and without it there is too little to measure."""
    on(world, TIGHT)
    cluster(world).takes_bytes = GIB
    async with world.controlled():
        first, second = await measuring(world, "one"), world.register("two")
        holder = reservations(world)[0].holder
        real, samples = cluster(world).inventory, [3]

        async def late() -> Inventory:
            if not any(who == holder for _, who in cluster(world).running) and samples[0]:
                samples[0] -= 1
                return Inventory(
                    (replace(TIGHT, free_bytes=TIGHT.free_bytes - GIB, uses=(HolderMemory(holder, GIB),)),)
                )
            return await real()

        monkeypatch.setattr(cluster(world), "inventory", late)
        cluster(world).go.set()
        for operation in (first, second):
            assert "loads measured in" in (await world.end(operation)).reason
    assert samples == [0]


# --- engines that wait ------------------------------------------------------------------------------


async def test_a_first_engine_waits_until_there_is_room(world: World) -> None:
    await_room = "waits until the architecture of 'two'"
    async with world.controlled():
        await known(world, "one")
        on(world, TIGHT)
        second = await measuring(world, "two")
        deploying = world.deploy("one")
        await world.until(lambda: await_room in asked(world, deploying).reason)
        found = world.repository.read().deployments["one"].record
        assert await_room in found.reason
        assert not cluster(world).launches
        cluster(world).go.set()
        assert (await world.end(deploying)).phase is Phase.DEPLOYED
        assert (await world.end(second)).phase is Phase.READY
    assert len(cluster(world).orders) == 1


async def test_a_deployment_that_fits_next_to_a_measurement_does_not_wait(world: World) -> None:
    async with world.controlled():
        await known(world, "one")
        await measuring(world, "two")
        assert (await world.end(world.deploy("one"))).phase is Phase.DEPLOYED
        assert cluster(world).running


async def test_a_deployment_that_never_fits_is_refused_at_once(world: World) -> None:
    async with world.controlled():
        await known(world, "one")
        on(world, TIGHT)
        await measuring(world, "two")
        failed = await world.end(world.deploy("one", intent="latSLO", SLOs={"tpot_ms": 1e-9}))
        assert failed.phase is Phase.FAILED
        assert failed.error is not None
        assert failed.error["error"]["code"] == "no_feasible_plan"
        assert cluster(world).running


async def test_the_next_measuring_waits_for_an_engine_that_waits(world: World) -> None:
    """Otherwise a row of registrations would keep it out for ever."""
    async with world.controlled():
        second, deploying = await engine_waits(world)
        third = await waiting(world, "three", "until the engine of 'one' is placed")
        cluster(world).go.set()
        assert (await world.end(deploying)).phase is Phase.DEPLOYED
        assert (await world.end(second)).phase is Phase.READY
        ended = await world.end(third)  # the engine has the memory that it needed
    assert ended.phase is Phase.READY
    assert "measuring needs" in ended.reason


async def test_a_controller_killed_while_both_wait_leaves_no_deadlock(world: World) -> None:
    async with world.controlled():
        second, deploying = await engine_waits(world)
    async with world.controlled():  # the measuring that died does not begin again before the engine
        assert (await world.end(deploying)).phase is Phase.DEPLOYED
        assert (await world.end(second)).phase is Phase.READY


async def test_a_deployment_that_waits_can_be_cancelled(world: World) -> None:
    async with world.controlled():
        second, deploying = await engine_waits(world)
        cancel(world.repository, deploying.id)
        assert (await world.end(deploying)).phase is Phase.CANCELLED
        assert "one" not in world.repository.read().deployments
        cluster(world).go.set()
        assert (await world.end(second)).phase is Phase.READY


async def test_plans_and_moves_name_what_they_would_wait_for(world: World) -> None:
    async with world.controlled():
        await known(world, "one")
        on(world, TIGHT)
        await measuring(world, "two")
        now, inventory = world.repository.read(), await cluster(world).inventory()
        request = DeployModelRequest.model_validate({"model": "one"})
        found = preview.preview(now, inventory, world.settings, request, fresh_context())
        assert found.placement is not None
        assert "waits until the architecture of 'two'" in found.waits
        deploying = world.deploy("one")
        await world.until(lambda: "waits until" in asked(world, deploying).reason)
        told = rebalancing.propose(world.repository.read(), inventory, world.settings)
        assert told.proposal is None
        assert "there is room, but waits until the architecture of 'two'" in told.refusal


@pytest.mark.parametrize(("holder", "kind", "victims"), [("measuring:k", "h200", ("k",)), ("m", "cpu", ())])
def test_a_host_is_no_place_for_what_a_gpu_is_measured_on_for_now(
    files: Path, settings: Settings, holder: str, kind: str, victims: tuple[str, ...]
) -> None:
    """A deployment keeps to the kind of device that its first engine is on."""
    gpu = replace(HOST, node="gpu", kind="h200", model="h200")
    held = NodeLedger("gpu", (Reservation(holder, 1, 0, "h200", 0, gpu.total_bytes, 0.0),))
    now, base = state(held), ready_base(files)
    seen = reclaimable_memory.free_memory(Inventory((gpu, HOST)), now.ledgers, 0.0)
    asked_for = deployment("b", Phase.PENDING, placed=None)
    found = reclaimable_memory.place(lambda free: deploying.decide(base, asked_for, free, settings), seen)
    assert (found.placement.ranks[0].device_kind, found.victims) == (kind, victims)


# --- engines that do not ----------------------------------------------------------------------------


async def deployed(world: World) -> None:
    """Model `one` serves on a node of its own; on `other` there is room for it or for a measuring."""
    lone = replace(TIGHT, node="lone")
    await known(world, "one")
    on(world, lone)
    assert (await world.end(world.deploy("one"))).phase is Phase.DEPLOYED
    on(world, lone, replace(ROOMIER, node="other"))


def overlapping_launches(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Groups that are launched on a device on which something runs whose memory they were given."""
    real, found = cluster(world).launch, list[str]()

    async def launch(config: EngineConfig) -> None:
        there = {(rank.node, "cpu", rank.device_index) for rank in config.ranks}
        measured = ledger.being_measured(world.repository.read().ledgers)
        running = {at for at, _ in cluster(world).running if at not in measured}
        found.extend([config.group_name] * len(there & running))
        await real(config)

    monkeypatch.setattr(cluster(world), "launch", launch)
    return found


async def test_a_measurement_gives_way_to_an_engine_that_is_placed_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.controlled():
        await deployed(world)
        beside = overlapping_launches(world, monkeypatch)
        cluster(world).takes_bytes = GIB
        cluster(world).slow = True
        second = await measuring(world, "two")
        cluster(world).go.set()
        await world.until(lambda: (found := profile(world, "two")) and found.points)
        cluster(world).go.clear()
        assert reservations_of(world, "two") == ["other"]
        world.lose("lone")
        await world.until(lambda: serves_on(world, "one") == "other")
        assert beside == []
        await world.until(lambda: len(cluster(world).orders) == 2)  # in the memory that is left
        cut = profile(world, "two")
        assert cut is not None
        assert cut.measurements
        assert cut.attempts <= 1
        cluster(world).go.set()
        ended = await world.end(second)
        found = profile(world, "two")
    assert any("its memory went to the engine of 'one'" in event.message for event in ended.events)
    assert found is not None
    assert progress.is_whole(found)
    first, again = cluster(world).orders
    assert set(cut.measurements) <= set(again.known)
    assert again.device_bytes < first.device_bytes


def reservations_of(world: World, name: str) -> list[str]:
    """The nodes that hold memory to measure a model."""
    found = profile(world, name)
    assert found is not None
    ledgers = world.repository.read().ledgers
    return [at[0] for at, key in ledger.being_measured(ledgers).items() if key == found.key]


def serves_on(world: World, name: str) -> str:
    (group,) = world.repository.read().deployments[name].record.groups
    return group.placement.ranks[0].node if group.placement and group.phase is GroupPhase.SERVING else ""


async def test_a_measurement_continues_next_to_an_engine_with_room(world: World) -> None:
    async with world.controlled():
        await deployed(world)
        on(world, *(replace(HOST, node=node) for node in ("lone", "other")))
        second = await measuring(world, "two")
        world.lose("lone")
        await world.until(lambda: serves_on(world, "one") == "other")
        cluster(world).go.set()
        assert (await world.end(second)).phase is Phase.READY
    assert len({order.holder for order in cluster(world).orders}) == 1


async def test_a_preempted_measurement_is_no_failure_of_its_profile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine fails before the controller looks whether the measurement continues."""
    monkeypatch.setattr(profile_actions, "LOOK_S", 60.0)

    told: list[str] = []

    async def displaced(order: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        cluster(world).orders.append(order)
        cluster(world).running.append((DeviceKey(node, "cpu", 0), order.holder))
        await world.until(lambda: (found := profile(world, "two")) and found.phase is Phase.PENDING)
        cluster(world).running.clear()
        cluster(world).go.set()
        monkeypatch.setattr(cluster(world), "measure", real)
        for line in told:
            yield line
        raise errors.ProfilingFailed("out of memory")

    async with world.controlled():
        await deployed(world)
        real = cluster(world).measure
        monkeypatch.setattr(cluster(world), "measure", displaced)
        second = await measuring(world, "two")
        world.lose("lone")
        assert "loads measured in" in (await world.end(second)).reason
        assert serves_on(world, "one") == "other"
    assert len(cluster(world).orders) == 2
