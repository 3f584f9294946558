"""Deployments of several worker groups, and what becomes of them when something is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.state.deployments import with_group
from controlplane.state.records import Phase
from controlplane.state.repository import Put
from controlplane.state.worker_groups import GroupPhase
from controlplane.traffic.route_table import build_table
from placement.types import Inventory
from testkit.controlplane.world import NODES, World, placed, reserved
from testkit.controlplane.world_groups import APART, base_of, group, nodes_of, two_groups, until_serving
from testkit.in_memory import CPU

pytestmark = pytest.mark.usefixtures("hurry")


async def test_two_groups_have_an_engine_and_reservations_each(world: World) -> None:
    async with world.controlled():
        await two_groups(world, **APART)
        assert sorted(world.cluster.launches) == ["base", "base@1"]
        assert sorted(map(tuple, nodes_of(base_of(world)).values())) == [("node",), ("other",)]
        state = world.repository.read()
        assert reserved(state) == placed(state)
        assert {holder for holder, *_ in reserved(state)} == {"base", "base@1"}
        assert build_table(state).groups == {"base": ("base", "base@1")}
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED
        assert [set(world.cluster.engines[name].loaded) for name in ("base", "base@1")] == [{"v1"}] * 2
        for name in ("v1", "base"):
            assert (await world.end(world.undeploy(name))).phase is Phase.DELETED
    assert world.cluster.engines == {}
    assert world.repository.read().ledgers == {}


async def test_a_group_on_a_lost_node_is_placed_on_what_is_left(world: World) -> None:
    async with world.controlled():
        await two_groups(world)
        world.lose("node")
        await world.until(lambda: set().union(*nodes_of(base_of(world)).values()) == {"other"})
        await until_serving(world, 2)
        found = base_of(world)
        assert (found.phase, found.reason) == (Phase.DEPLOYED, "")
        state = world.repository.read()
        assert reserved(state) == placed(state)


async def test_a_group_without_room_stays_desired_and_is_placed_later(world: World) -> None:
    async with world.controlled():
        await two_groups(world, **APART)
        (lost,) = (int(n == "base@1") for n, where in nodes_of(base_of(world)).items() if where == {"node"})
        world.lose("node")
        await world.until(lambda: group(world, lost).refused_on)
        found = base_of(world)
        assert found.phase is Phase.DEPLOYED
        assert "antiAffinity" in group(world, lost).reason
        assert "meanwhile 1 of 2 groups answer" in found.reason
        assert build_table(world.repository.read()).groups == {"base": (["base@1", "base"][lost],)}
        assert {holder for holder, *_ in reserved(world.repository.read())} == {["base@1", "base"][lost]}
        world.find()
        await until_serving(world, 2)
        assert base_of(world).reason == ""


async def test_the_only_group_is_placed_elsewhere_and_requests_get_an_error_meanwhile(world: World) -> None:
    async with world.controlled():
        await world.up("v1")
        world.lose("node", "other")
        await world.until(lambda: group(world, 0).refused_on)
        for name in ("base", "v1"):
            with pytest.raises(errors.Unavailable) as refusal:
                build_table(world.repository.read()).resolve(name)
            assert refusal.value.retry_after_s
        assert "refused with Retry-After" in base_of(world).reason
        world.find()
        await until_serving(world, 1)
        assert build_table(world.repository.read()).resolve("v1").base == "base"


def smaller(world: World) -> None:
    world.cluster.devices = Inventory(
        (replace(CPU, total_bytes=1 << 20, free_bytes=1 << 20), NODES.devices[1])
    )


def failed(world: World) -> None:
    world.cluster.engines["base"].view = EngineView(EngineStatus.FAILED, "Traceback\nRuntimeError: it died\n")


@pytest.mark.parametrize(("strike", "nodes"), [(smaller, {"other"}), (failed, {"node", "other"})])
async def test_a_group_that_cannot_continue_is_placed_again(
    world: World, strike: Callable[[World], None], nodes: set[str]
) -> None:
    async with world.controlled():
        await world.up()
        assert nodes_of(base_of(world)) == {"base": {"node"}}
        strike(world)
        await world.until(lambda: len(world.cluster.launches) == 2)
        await until_serving(world, 1)
        assert nodes_of(base_of(world))["base"] <= nodes
        assert group(world, 0).failures == 1


@pytest.mark.usefixtures("quick")
async def test_groups_come_with_the_load_and_go_with_it(world: World) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.deploy("base", replicas={"min": 1, "max": 3, "targetInFlight": 2}))
        world.cluster.requests = {"base": 5}
        await until_serving(world, 3)
        assert set(world.cluster.engines) == {"base", "base@1", "base@2"}
        world.cluster.requests = None  # the gateways do not answer: nothing changes
        await asyncio.sleep(0.5)
        assert len(base_of(world).groups) == 3
        world.cluster.requests = {"base": 1}
        await world.until(lambda: base_of(world).group_ids() == ("base",))
        await world.until(lambda: set(world.cluster.engines) == {"base"})
        state = world.repository.read()
        assert reserved(state) == placed(state)


@pytest.mark.usefixtures("quick")
async def test_an_idle_deployment_sleeps_and_wakes_with_a_request(world: World) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.register("v1", "base"))
        await world.end(world.deploy("base", replicas={"min": 0, "max": 1, "idleS": 1}))
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED
        await world.until(lambda: not world.cluster.engines and not base_of(world).groups)
        assert world.repository.read().ledgers == {}
        table = build_table(world.repository.read())
        assert (table.resolve("v1").base, table.groups) == ("base", {})  # a request is taken, and waits
        assert "idle, so no engine runs" in base_of(world).reason
        world.cluster.held.add("base")
        world.cluster.requests = {"base": 1}
        await world.until(lambda: "base" in world.cluster.engines)
        assert build_table(world.repository.read()).resolve("base").base == "base"  # still waits
        world.cluster.held.clear()
        await until_serving(world, 1)
        assert build_table(world.repository.read()).groups == {"base": ("base",)}
        assert (await world.end(world.undeploy("v1"))).phase is Phase.DELETED
        assert (await world.end(world.undeploy("base"))).phase is Phase.DELETED


async def test_a_drained_group_ends_its_requests_and_frees_its_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.controller.group_actions.QUIET_S", 0.05)
    monkeypatch.setattr("controlplane.controller.group_actions.LOOK_S", 0.01)
    ongoing, real = {"base": 1, "base@1": 0}, world.cluster.reports

    async def reports(name: str) -> Any:
        return [replace(one, ongoing_requests=ongoing.get(name, 0)) for one in await real(name)]

    monkeypatch.setattr(world.cluster, "reports", reports)
    async with world.controlled():
        await two_groups(world)
        found = world.repository.read().deployments["base"]
        leaving = replace(found.record.groups[0], phase=GroupPhase.DRAINING)
        world.repository.commit([Put(with_group(found.record, leaving), found.version)])
        assert build_table(world.repository.read()).groups == {"base": ("base@1",)}
        await world.until(lambda: "base@2" in world.cluster.engines)  # two are wanted
        await asyncio.sleep(0.2)
        assert "base" in world.cluster.engines  # a request is still answered
        ongoing["base"] = 0
        await world.until(lambda: base_of(world).group_ids() == ("base@1", "base@2"))
        await world.until(lambda: set(world.cluster.engines) == {"base@1", "base@2"})
        assert {holder for holder, *_ in reserved(world.repository.read())} == {"base@1", "base@2"}
