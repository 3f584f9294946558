"""A `World` whose models are measured, and waits for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.records import ModelProfile, Operation, Phase
from placement.types import Inventory
from testkit import checkpoints
from testkit.controlplane.world import World
from testkit.controlplane.world_reservations import Checked, cluster
from testkit.measured_cluster import HOST, MeasuredCluster

MIB = 1 << 20
# While the models below are measured there is no room for an engine, which needs 256 MiB at least.
TIGHT = replace(HOST, total_bytes=2350 * MIB, free_bytes=2350 * MIB)
# The same, but next to an engine there is enough memory to measure, with less to spare.
ROOMIER = replace(HOST, total_bytes=2420 * MIB, free_bytes=2420 * MIB)


def measured_world(settings: Settings, store: StateStore, folder: Path, *names: str) -> World:
    """A formula gives the measurements; models of these names in `folder`, no two of an architecture."""
    for layers, name in enumerate(names, 2):
        checkpoints.write_model(folder / name, checkpoints.config(num_hidden_layers=layers))
    changes = {"engine": "vllm", "allowed_roots": str(folder)}
    made = World(settings.model_copy(update=changes), Checked(store), folder)
    made.cluster = MeasuredCluster()
    return made


def on(world: World, *devices: object) -> None:
    cluster(world).devices = Inventory(devices)  # type: ignore[arg-type]


def profile(world: World, name: str) -> ModelProfile | None:
    now = world.repository.read()
    found = now.profiles.get(now.models[name].record.profile or "") if name in now.models else None
    return found.record if found else None


def asked(world: World, operation: Operation) -> Operation:
    return world.repository.read().operations[operation.id].record


async def measuring(world: World, name: str) -> Operation:
    """Its registration, once it is measured, and until it may `go`."""
    cluster(world).go.clear()
    operation = world.register(name)
    await world.until(lambda: (found := profile(world, name)) and found.phase is Phase.PROFILING)
    await world.until(lambda: cluster(world).running)
    return operation


async def waiting(world: World, name: str, until: str) -> Operation:
    """Its registration, once its reason says that it waits until `until`."""
    operation = world.register(name)
    await world.until(lambda: asked(world, operation).reason.startswith("waits until"))
    assert until in asked(world, operation).reason
    return operation


async def known(world: World, *names: str) -> None:
    """Registered, and measured."""
    for name in names:
        assert (await world.end(world.register(name))).phase is Phase.READY
    cluster(world).orders.clear()
