"""A launch whose deployment changes after it was placed and before its engine is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from controlplane.controller.group_actions import GroupActions
from controlplane.controller.interfaces import Hooks
from controlplane.controller.transitions import undo_operation
from controlplane.planning.autoscaling import active
from controlplane.state.records import Deployment, Operation, Phase
from controlplane.state.repository import Put
from controlplane.state.transactions import Superseded
from controlplane.state.worker_groups import WorkerGroup
from testkit.controlplane.world import World
from testkit.in_memory import cancel

pytestmark = pytest.mark.usefixtures("hurry")


def asked_to_cancel(world: World, deploying: Operation) -> None:
    cancel(world.repository, deploying.id)


def cancelled(world: World, deploying: Operation) -> None:
    world.repository.commit(undo_operation(world.repository.read(), deploying.id))


def undeployed(world: World, deploying: Operation) -> None:
    world.undeploy("base")


def deployed_again(world: World, deploying: Operation) -> None:
    changed(world, uid=99, groups=(WorkerGroup(0),), phase=Phase.PENDING)


def limited(world: World, deploying: Operation) -> None:
    changed(world, max_active_variants=1)


def changed(world: World, **changes: Any) -> None:
    found = world.repository.get(Deployment, "base")
    assert found is not None
    world.repository.commit([Put(replace(found.record, **changes), found.version)])


async def launched(world: World, meanwhile: Callable[[World, Operation], None]) -> None:
    """Launch "base", with an event while its waiting operations get its placement."""
    async with world.controlled():
        await world.end(world.register("base"))
    deploying = world.deploy("base")

    async def note(*_: object, **__: object) -> None:
        meanwhile(world, deploying)

    async def nothing(*_: Any, **__: Any) -> None: ...

    hooks = Hooks(note, nothing, lambda base: None, active, nothing)
    await GroupActions(world.settings, world.repository, world.cluster, hooks, nothing).launch("base")


@pytest.mark.parametrize("meanwhile", [asked_to_cancel, cancelled, undeployed, deployed_again])
async def test_a_group_that_is_no_longer_wanted_is_not_started(
    world: World, meanwhile: Callable[[World, Operation], None]
) -> None:
    with pytest.raises(Superseded):
        await launched(world, meanwhile)
    assert world.cluster.launches == []


async def test_a_group_with_changed_settings_is_started(world: World) -> None:
    await launched(world, limited)
    assert world.cluster.launches == ["base"]
