"""Engines that Serve would wait for until the end of days: restarted nodes, and starts that do not end."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.settings import Settings
from controlplane.state.records import Phase
from controlplane.state.repository import Repository
from placement.types import Inventory
from testkit.controlplane.world import NODES, World
from testkit.controlplane.world_groups import base_of, group, until_serving
from testkit.in_memory import CPU

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path) -> World:
    hasty = Settings(**{**settings.model_dump(), "start_limit_s": 0.2})
    made = World(hasty, repository, files)
    made.cluster.devices = Inventory((CPU,))
    return made


async def test_a_group_on_a_restarted_node_is_placed_again(world: World) -> None:
    async with world.controlled():
        await world.up()
        assert group(world, 0).node_ids == {"node": "1"}
        before = world.cluster.engines["base"]
        world.cluster.node_ids["node"] = "2"  # Serve says RUNNING for a while
        await world.until(lambda: group(world, 0).node_ids == {"node": "2"})
        await until_serving(world, 1)
        assert world.cluster.engines["base"] is not before


async def test_a_first_start_that_does_not_end_fails_the_deployment(world: World) -> None:
    world.cluster.held.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        ended = await world.end(world.deploy("base"))
        assert ended.phase is Phase.FAILED
        assert "the engine did not start within 0.2 s" in ended.reason
        assert world.cluster.engines == {}


async def test_a_later_start_that_does_not_end_is_tried_again(world: World) -> None:
    world.cluster.devices = NODES
    async with world.controlled():
        await world.up()
        world.cluster.held.add("base")
        world.lose("node", "other")
        await world.until(lambda: group(world, 0).refused_on)
        world.find()
        await world.until(lambda: world.cluster.launches.count("base") >= 3)
        assert group(world, 0).failures >= 2
        assert "did not start within" in base_of(world).reason
        world.cluster.held.clear()
        await until_serving(world, 1)


def test_the_limit_is_generous() -> None:
    assert Settings().start_limit_s == 1800
