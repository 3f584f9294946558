"""Actions on groups that overtake each other: what was decided for one is never done to another."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.controller.group_actions import GroupActions
from controlplane.controller.launch_action import LaunchAction
from controlplane.planning.autoscaling import resized
from controlplane.state.deployments import with_group
from controlplane.state.records import Phase
from controlplane.state.repository import Put
from controlplane.state.worker_groups import GroupPhase
from placement.types import Inventory
from testkit.controlplane.world import World, reserved
from testkit.controlplane.world_groups import base_of, two_groups
from workers.messages import EngineConfig, VariantRef, WorkerReport


def begin_to_drain(world: World) -> None:
    found = world.repository.read().deployments["base"]
    leaving = replace(found.record.groups[0], phase=GroupPhase.DRAINING)
    world.repository.commit([Put(with_group(found.record, leaving), found.version)])


async def test_a_group_that_drained_is_not_the_next_one_of_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undeployed while it drains, and deployed again: the drain ends, the new engine stays."""
    asked = 0
    answer = world.cluster.reports

    ended = asyncio.Event()
    drain = GroupActions.drain

    async def drained(self: GroupActions, group: str) -> None:
        try:
            await drain(self, group)
        finally:
            ended.set()

    async def reports(name: str) -> list[WorkerReport]:
        nonlocal asked
        asked += 1
        return [replace(one, ongoing_requests=1) for one in await answer(name)]

    monkeypatch.setattr(GroupActions, "drain", drained)
    monkeypatch.setattr(world.cluster, "reports", reports)
    monkeypatch.setattr("controlplane.controller.group_actions.LOOK_S", 0.01)
    monkeypatch.setattr("controlplane.controller.group_actions.QUIET_S", 0.0)
    async with world.controlled():
        await world.up()
        begin_to_drain(world)
        await world.until(lambda: asked > 2)
        assert (await world.end(world.undeploy("base"))).phase is Phase.DELETED
        assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
        await asyncio.wait_for(ended.wait(), 30)
        assert [group.phase for group in base_of(world).groups] == [GroupPhase.SERVING]
        assert list(world.cluster.engines) == ["base"]


async def test_a_group_that_serves_is_not_stopped_for_one_that_cannot_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of a new deployment, one of which fails in the same look in which the other runs."""
    begin, end = world.cluster._start, world.cluster.stop
    stopped: list[str] = []

    async def start(group_id: str, engine: Any) -> None:
        if len(world.cluster.launches) > 2:
            await begin(group_id, engine)
        elif len(world.cluster.engines) == 2:
            await begin(group_id, engine)  # with its end this one runs; at once the other has failed
            world.cluster.engines["base"].view = EngineView(EngineStatus.FAILED, "RuntimeError: no memory")

    async def stop(group: str) -> None:
        stopped.append(group)
        await end(group)

    monkeypatch.setattr(world.cluster, "_start", start)
    monkeypatch.setattr(world.cluster, "stop", stop)
    async with world.controlled():
        await world.end(world.register("base"))
        done = await world.end(world.deploy("base", replicas={"min": 2, "max": 2}))
        assert done.phase is Phase.DEPLOYED
        await world.until(lambda: len(base_of(world).serving_ids()) == 2)
        assert stopped == ["base"]


async def test_a_cluster_that_refuses_every_launch_ends_the_deployment(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    async def launch(config: EngineConfig) -> None:
        launched.append(config.group_name)
        raise RuntimeError("Serve says no")

    monkeypatch.setattr(world.cluster, "launch", launch)
    monkeypatch.setattr("controlplane.planning.rescheduling.FIRST_DELAY_S", 0.01)
    async with world.controlled():
        await world.end(world.register("base"))
        done = await world.end(world.deploy("base"))
        assert done.phase is Phase.FAILED
        assert "Serve says no" in done.reason
        assert launched == ["base"] * 5
        assert reserved(world.repository.read()) == set()


async def test_a_group_that_cannot_be_asked_does_not_hold_a_variant_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = world.cluster.load_variant

    async def load_variant(group: str, variant: VariantRef) -> None:
        if group == "base@1":
            raise errors.EngineFailed("it is being restarted")
        await load(group, variant)

    async with world.controlled():
        await two_groups(world)
        world.cluster.engines["base@1"].view = EngineView(EngineStatus.UNHEALTHY, "no answer")
        monkeypatch.setattr(world.cluster, "load_variant", load_variant)
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED


@pytest.mark.usefixtures("quick")
async def test_a_variant_wakes_the_base_that_it_is_deployed_on(world: World) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.register("v1", "base"))
        await world.end(world.deploy("base", replicas={"min": 0, "max": 1, "idleS": 1}))
        await world.until(lambda: not world.cluster.engines and not base_of(world).groups)
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED


async def test_a_group_that_is_to_go_by_now_gets_no_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to drain while its place is sought."""
    look, place = world.cluster.inventory, LaunchAction._decide
    sought, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def inventory() -> Inventory:
        sought.set()
        await go_on.wait()
        return await look()

    async def decide(self: LaunchAction, group: str) -> Any:
        try:
            return await place(self, group)
        finally:
            ended.set()

    def resize(count: int) -> None:
        found = world.repository.read().deployments["base"]
        world.repository.commit([Put(resized(found.record, count), found.version)])

    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.deploy("base", replicas={"min": 1, "max": 2}))
        monkeypatch.setattr(world.cluster, "inventory", inventory)
        monkeypatch.setattr(LaunchAction, "_decide", decide)
        monkeypatch.setattr(
            "controlplane.controller.group_actions.QUIET_S", 30.0
        )  # so that it is there to the end
        resize(2)
        await sought.wait()
        resize(1)
        go_on.set()
        await ended.wait()
        assert [group.phase for group in base_of(world).groups] == [GroupPhase.SERVING, GroupPhase.DRAINING]
        assert {holder for holder, *_ in reserved(world.repository.read())} == {"base"}
