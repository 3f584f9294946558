"""A model that was on a GPU waits for one: it is never put on a CPU host because its node does not report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.planning.placement_decision import suited
from controlplane.settings import Settings
from controlplane.state import records
from controlplane.state.records import Deployment, Phase
from controlplane.state.repository import Put, Repository
from controlplane.state.worker_groups import GroupPhase
from placement.types import Intent, Inventory, Unusable
from profiler.types import DeviceRates
from testkit.controlplane.world import World
from testkit.controlplane.world_groups import base_of, group, until_serving
from testkit.in_memory import CPU

pytestmark = pytest.mark.usefixtures("hurry")

GPU = replace(CPU, kind="h200", rates=DeviceRates(1e12, 1e14))
HOST = replace(CPU, node="host")
BOTH = Inventory((GPU, HOST))
SILENT = "stale report: the last report of node node was 9.0 s ago"


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path) -> World:
    made = World(settings, repository, files)
    made.cluster.devices = BOTH
    return made


def on_gpu(world: World) -> bool:
    return [r.device_kind for g in base_of(world).groups if g.placement for r in g.placement.ranks] == [
        "h200"
    ]


def dies(world: World) -> None:
    world.lose("node")


def is_silent(world: World) -> None:
    """Its agent hangs, and the engine there fails."""
    world.cluster.devices = Inventory((HOST,), (Unusable("node", SILENT),))
    world.cluster.engines["base"].view = EngineView(EngineStatus.FAILED, "RuntimeError: CUDA error")


@pytest.mark.parametrize(("strike", "reason"), [(dies, "node node is gone"), (is_silent, SILENT)])
async def test_a_model_waits_for_its_gpu_and_is_placed_when_the_node_reports_again(
    world: World, strike: Callable[[World], None], reason: str
) -> None:
    async with world.controlled():
        await world.up()
        assert on_gpu(world)
        strike(world)
        await world.until(lambda: group(world, 0).refused_on)
        assert group(world, 0).phase is GroupPhase.PENDING
        assert reason in group(world, 0).reason
        assert "node host has no GPU" in base_of(world).reason
        world.cluster.devices = BOTH
        await until_serving(world, 1)
        assert on_gpu(world)


async def test_an_older_record_takes_its_kind_from_its_placement(world: World) -> None:
    async with world.controlled():
        await world.up()
        found = world.repository.read().deployments["base"]
        older = replace(found.record, kind="", groups=(replace(found.record.groups[0], kind=""),))
        world.repository.commit([Put(older, found.version)])
        world.lose("node")
        await world.until(lambda: group(world, 0).refused_on)
        assert group(world, 0).kind == "h200"


async def test_a_repeated_deployment_chooses_again(world: World) -> None:
    async with world.controlled():
        await world.up()
        world.lose("node")
        await world.until(lambda: group(world, 0).refused_on)
        assert (await world.end(world.undeploy("base"))).phase is Phase.DELETED
        assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
        assert not on_gpu(world)


async def test_a_model_on_a_cpu_host_may_move_to_another(world: World) -> None:
    world.cluster.devices = Inventory((HOST, replace(CPU, node="other")))
    async with world.controlled():
        await world.up()
        (rank,) = group(world, 0).placement.ranks  # type: ignore[union-attr]
        world.lose(rank.node)
        await until_serving(world, 1)
        await world.until(lambda: base_of(world).reason == "")


def test_devices_of_the_wanted_kind_suit() -> None:
    assert suited(BOTH, "") is suited(BOTH, "cpu") is BOTH
    found = suited(BOTH, "h200")
    assert found.devices == (GPU,)
    assert [u.node for u in found.unusable] == ["host"]


def test_kinds_survive_the_store_and_older_records_have_none() -> None:
    fresh = Deployment("b", 1, "b", Phase.DEPLOYED, Intent.MIN_COST, 16, kind="h200")
    assert records.load(Deployment, records.dump(fresh)).device_kind == "h200"
    text = '{"model":"b","uid":1,"host":"b","phase":"Deployed","intent":"minCost","max_output_tokens":1}'
    older = records.load(Deployment, text)
    assert older.kind == ""
