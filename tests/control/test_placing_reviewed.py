"""What a review of placements beside measurings found, so that it stays found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoints
import pytest
from measured_cluster import HOST, MeasuredCluster
from test_controller import World, _hurry  # noqa: F401 - a fixture
from test_measuring_reserves import Checked, cluster
from test_measuring_waits import MIB, TIGHT, asked, known, measuring, on

from controlplane import planning
from controlplane.api.deploy_requests import DeployModelRequest
from controlplane.api.services import fresh_context
from controlplane.settings import Settings
from controlplane.state import StateStore

# Room for one engine beside which nothing else has any.
SMALL = replace(HOST, node="small", total_bytes=400 * MIB, free_bytes=400 * MIB)


@pytest.fixture
def world(settings: Settings, store: StateStore, tmp_path: Path) -> World:
    folder = tmp_path / "files"
    for layers, name in enumerate(("one", "two"), 2):
        checkpoints.write_model(folder / name, checkpoints.config(num_hidden_layers=layers))
    changes = {"engine": "vllm", "allowed_roots": str(folder)}
    made = World(settings.model_copy(update=changes), Checked(store), folder)
    made.cluster = MeasuredCluster()
    return made


def preview(world: World, replicas: int) -> planning.Preview:
    request = DeployModelRequest.model_validate(
        {"model": "one", "replicas": {"min": replicas, "max": replicas}}
    )
    now, inventory = world.repository.read(), cluster(world).devices
    return planning.preview(now, inventory, world.settings, request, fresh_context())


@pytest.mark.parametrize(("replicas", "waits"), [(1, False), (2, True)])
async def test_a_plan_of_several_groups_tells_what_the_last_would_wait_for(
    world: World, replicas: int, waits: bool
) -> None:
    """There is room for one now; a second one finds it where is measured."""
    async with world.controlled():
        await known(world, "one")
        on(world, TIGHT)
        await measuring(world, "two")
        on(world, TIGHT, SMALL)
        found = preview(world, replicas)
        assert found.placement is not None
        assert found.placement.ranks[0].node == "small"
        assert ("waits until the architecture of 'two'" in found.waits) is waits
        cluster(world).held |= {"one", "one@1"}  # beside one that serves the other would not wait
        deploying = world.deploy("one", replicas={"min": replicas, "max": replicas})
        await world.until(lambda: cluster(world).launches)
        if waits:
            await world.until(lambda: found.waits in [e.message for e in asked(world, deploying).events])
        assert len(cluster(world).launches) == 1
