"""The proposed moves on the records of a real store: moved and placed models, and destinations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controlplane.planning import rebalancing
from controlplane.planning.rebalancing import RebalanceOutcome
from controlplane.state.records import Deployment, Phase
from controlplane.state.repository import Change, Put
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from placement.types import Device, DeviceKey, Inventory
from profiler.types import DeviceRates
from testkit import checkpoints
from testkit.controlplane.world import World, placed, reserved
from testkit.controlplane.world_groups import base_of, nodes_of
from testkit.controlplane.world_moves import apart, needs, proposed, wanted
from testkit.in_memory import CPU, GIB

pytestmark = pytest.mark.usefixtures("hurry")

GPU = replace(CPU, node="gpu", kind="h200", rates=DeviceRates(4e12, 5e14))
APART: dict[str, Any] = {"antiAffinity": {"group": "g", "scope": "node"}}


def asked(world: World) -> RebalanceOutcome:
    return rebalancing.propose(world.repository.read(), world.cluster.devices, world.settings)


def hosts(**sizes: int) -> tuple[Device, ...]:
    return tuple(replace(CPU, node=n, total_bytes=size, free_bytes=size) for n, size in sizes.items())


async def deploy_on(world: World, devices: tuple[Device, ...], node: str, name: str, **options: Any) -> None:
    """Where nothing is free but on one node."""
    full = tuple(d if d.node == node else replace(d, free_bytes=0) for d in devices)
    world.cluster.devices = Inventory(full)
    assert (await world.end(world.deploy(name, **options))).phase is Phase.DEPLOYED
    world.cluster.devices = Inventory(devices)


async def until_groups(world: World, name: str, count: int) -> None:
    await world.until(lambda: len(world.repository.read().deployments[name].record.groups) == count)


def model_of(change: Change) -> str:
    assert isinstance(change, Put)
    assert isinstance(change.record, Deployment)
    return change.record.model


def put(world: World, record: Deployment, version: int = 0) -> None:
    world.repository.commit([Put(record, version)])


@pytest.mark.usefixtures("quick")
async def test_several_moves_end_as_they_were_proposed(world: World) -> None:
    """`asmall`, launched first, fits where only `zbig` can go."""
    layers = {"asmall": 2, "zbig": 8, "huge1": 40, "huge2": 40}
    for name, count in layers.items():
        config = {**checkpoints.config(), "num_hidden_layers": count}
        checkpoints.write_model(world.files / name, config)
    needed: dict[str, int] = {}
    async with world.controlled():
        world.cluster.devices = Inventory(hosts(any=8 * GIB))
        for name in layers:
            await world.end(world.register(name))
            assert (await world.end(world.deploy(name))).phase is Phase.DEPLOYED
            found = world.repository.read().deployments[name].record.placement
            assert found is not None
            needed[name] = sum(rank.memory_bytes for rank in found.ranks)
            await world.end(world.undeploy(name))
        both = {"left": ("asmall", "zbig"), "big": ("huge1", "zbig"), "small": ("huge2", "asmall")}
        devices = hosts(
            **{node: int(sum(needed[name] for name in names) / 0.97) + 64 for node, names in both.items()}
        )
        for node, name in (("big", "huge1"), ("small", "huge2"), ("left", "asmall"), ("left", "zbig")):
            await deploy_on(world, devices, node, name)
        proposal = proposed(world)
        planned = {m.tenant.name: m.placement.ranks[0].node for m in proposal.moves}
        assert planned == {"zbig": "big", "asmall": "small"}
        changes = rebalancing.begun(world.repository.read(), proposal)
        for name in sorted(planned):
            world.repository.commit([c for c in changes if model_of(c) == name])
            await until_groups(world, name, 2)
            await until_groups(world, name, 1)
        state = world.repository.read()
        for name, node in planned.items():
            assert nodes_of(state.deployments[name].record) == {f"{name}@1": {node}}
            (unit,) = state.deployments[name].record.groups
            # otherwise it could not be placed again elsewhere
            assert (unit.avoid, unit.replaces) == ((), None)
        assert reserved(state) == placed(state)


@pytest.mark.usefixtures("quick")
async def test_a_device_on_which_a_group_starts_is_not_freed(world: World) -> None:
    async with world.controlled():
        await apart(world)
        await world.end(world.register("third", folder="base"))
        world.cluster.held.add("third")
        world.deploy("third")
        await world.until(lambda: "third" in world.cluster.engines)
        third = nodes_of(world.repository.read().deployments["third"].record)["third"]
        found = asked(world)
        assert found.goal == "free a device"
        assert found.proposal is not None
        assert found.proposal.freed is not None
        assert {found.proposal.freed.node} != third


@pytest.mark.usefixtures("quick")
async def test_a_model_that_is_being_undeployed_is_neither_moved_nor_awaited(world: World) -> None:
    async with world.controlled():
        await apart(world)
    world.undeploy("base")
    assert {m.tenant.name for m in proposed(world).moves} == {"second"}
    world.undeploy("second")
    found = asked(world)
    assert (found.goal, found.proposal) == ("free a device", None)
    present = world.repository.read().deployments["base"]
    spare = WorkerGroup(1, replaces=0)
    put(world, replace(present.record, groups=(*present.record.groups, spare)), present.version)
    assert asked(world).proposal is None


@pytest.mark.usefixtures("quick")
async def test_a_group_that_can_never_fit_hides_no_other(world: World) -> None:
    async with world.controlled():
        for name in ("base", "second", "third", "aaa"):
            await world.end(world.register(name, folder="base"))
        await world.end(world.deploy("base"))
        size = needs(world)
        world.cluster.devices = Inventory(hosts(node=int(1.6 * size), other=int(2.7 * size)))
        await world.end(world.deploy("second", **APART))
        third = wanted(world, "third", APART)
        never = wanted(world, "aaa", {"SLOs": {"tpot_ms": 1e-9}})

    def waits(one: Deployment, *groups: WorkerGroup) -> Deployment:
        return replace(one, established=True, phase=Phase.DEPLOYING, groups=groups)

    group = WorkerGroup(0, refused_on="x", reason="no room")
    put(world, waits(never, group))
    alone = asked(world)
    assert (alone.goal, alone.proposal) == ("make room for aaa", None)
    assert "SLOs.tpot_ms" in alone.refusal
    put(world, waits(third, replace(group, phase=GroupPhase.DRAINING)))
    assert asked(world).proposal is None
    found = world.repository.read().deployments["third"]
    put(world, waits(third, group, replace(group, number=1)), found.version)
    put(world, replace(third, model="v1", groups=()))
    helped = asked(world)
    assert helped.goal == "make room for third"
    assert helped.proposal is not None
    assert [m.tenant.name for m in helped.proposal.moves] == ["base"]


@pytest.mark.usefixtures("quick")
async def test_nothing_is_moved_from_a_gpu_to_a_cpu_host(world: World) -> None:
    devices = (GPU, replace(CPU, node="host"))
    async with world.controlled():
        for name in ("base", "second"):
            await world.end(world.register(name, folder="base"))
        await deploy_on(world, devices, "gpu", "base")
        await deploy_on(world, devices, "host", "second")
    found = asked(world)
    assert (found.goal, found.proposal) == ("free a device", None)


async def strict_base(world: World) -> tuple[Device, Device]:
    """A base on the GPU, with a limit that only this one keeps but that may give way; and the devices."""
    devices = GPU, replace(GPU, node="slow", model="slower", rates=DeviceRates(1e10, 1e11))
    for name in ("base", "second"):
        await world.end(world.register(name, folder="base"))
    await deploy_on(world, devices, "gpu", "base")
    placement = base_of(world).placement
    assert placement is not None
    limits = {"tpot_ms": placement.estimate.tpot_s * 1000 * 1.1}
    await world.end(world.undeploy("base"))
    await deploy_on(world, devices, "gpu", "base", intent="latSLO", SLOs=limits, autoRelax={})
    return devices


@pytest.mark.usefixtures("quick")
async def test_no_limit_gives_way_to_a_move(world: World) -> None:
    async with world.controlled():
        devices = await strict_base(world)
        await deploy_on(world, devices, "slow", "second")
    found = proposed(world)  # the other way round it may go
    assert [(m.tenant.name, m.placement.ranks[0].node) for m in found.moves] == [("second", "gpu")]
    world.cluster.devices = Inventory((replace(GPU, free_bytes=0), devices[1]))
    assert asked(world).proposal is None


@pytest.mark.usefixtures("quick")
async def test_a_move_that_would_break_a_limit_by_now_is_dropped(world: World) -> None:
    async with world.controlled():
        await strict_base(world)
        found = world.repository.read().deployments["base"]
        spare = WorkerGroup(1, replaces=0, avoid=(DeviceKey("gpu", "h200", 0),))
        put(world, replace(found.record, groups=(*found.record.groups, spare)), found.version)
        await until_groups(world, "base", 1)
        assert nodes_of(base_of(world)) == {"base": {"gpu"}}
