"""Where an engine is placed while measurements run, and while memory of stopped engines is still seen."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.api import preview as planning
from controlplane.api.services import fresh_context
from controlplane.controller import launch_action
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.planning import reclaimable_memory
from controlplane.planning.reclaimable_memory import FreeMemory
from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.records import ModelProfile, NodeLedger, Phase, Reservation
from placement.types import (
    Choice,
    Constraint,
    Device,
    HolderMemory,
    Inventory,
    Placement,
    RankPlacement,
    Relaxation,
    key_of,
)
from testkit.controlplane.builders import PLACED, state
from testkit.controlplane.world import World
from testkit.controlplane.world_measuring import MIB, TIGHT, asked, known, measured_world, measuring, on
from testkit.controlplane.world_reservations import cluster, reservations
from testkit.in_memory import GIB
from testkit.measured_cluster import HOST

pytestmark = pytest.mark.usefixtures("hurry")

# There is room for one engine, and then for no other.
SMALL = replace(HOST, node="small", total_bytes=400 * MIB, free_bytes=400 * MIB)


@pytest.fixture
def world(settings: Settings, store: StateStore, tmp_path: Path) -> World:
    return measured_world(settings, store, tmp_path / "files", "one", "two")


def preview(world: World, replicas: int) -> planning.Preview:
    request = DeployModelRequest.model_validate(
        {"model": "one", "replicas": {"min": replicas, "max": replicas}}
    )
    now, inventory = world.repository.read(), cluster(world).devices
    return planning.preview(now, inventory, world.settings, request, fresh_context())


@pytest.mark.parametrize(("replicas", "waits"), [(1, False), (2, True)])
async def test_a_plan_of_several_groups_names_what_the_last_group_waits_for(
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
        cluster(world).held |= {"one", "one@1"}  # the other would not wait for a serving group
        deploying = world.deploy("one", replicas={"min": replicas, "max": replicas})
        await world.until(lambda: cluster(world).launches)
        if waits:
            await world.until(lambda: found.waits in [e.message for e in asked(world, deploying).events])
        assert len(cluster(world).launches) == 1


# --- memory that is given back ----------------------------------------------------------------------

GPU = replace(TIGHT, node="gpu", kind="h200", model="h200")


class Late:
    """Shows what a measuring had taken of GPUs for some more samples once it has ended; `named` or not."""

    def __init__(self, world: World, samples: float, named: bool = True) -> None:
        (reservation,) = reservations(world)
        self.cluster, self.samples, self.named = cluster(world), samples, named
        self.real, self.holder = cluster(world).inventory, reservation.holder

    async def inventory(self) -> Inventory:
        found = await self.real()
        if any(holder == self.holder for _, holder in self.cluster.running) or not self.samples:
            return found
        self.samples -= 1
        use = HolderMemory(self.holder if self.named else None, 2 * GIB)
        devices = [
            replace(d, free_bytes=d.free_bytes - 2 * GIB, uses=(use,)) if d.kind == "h200" else d
            for d in found.devices
        ]
        return replace(found, devices=tuple(devices))


async def placed_after_waiting(world: World, monkeypatch: pytest.MonkeyPatch, late: Late) -> str:
    """The kind of device that an engine gets that waited for what is measured."""
    monkeypatch.setattr(cluster(world), "inventory", late.inventory)
    deploying = world.deploy("one")
    await world.until(lambda: "waits until" in asked(world, deploying).reason)
    cluster(world).go.set()
    assert (await world.end(deploying)).phase is Phase.DEPLOYED
    (group,) = world.repository.read().deployments["one"].record.groups
    assert group.placement is not None
    return group.placement.ranks[0].device_kind


@pytest.mark.parametrize("named", [True, False])
async def test_an_engine_that_waited_for_a_gpu_gets_it_though_its_memory_is_seen_taken(
    world: World, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setattr(launch_action, "SAMPLED_S", 5.0)  # processes without a name are awaited no longer
    cluster(world).takes_bytes = 2 * GIB
    on(world, GPU, replace(HOST, node="cpu"))
    async with world.controlled():
        await known(world, "one")
        await measuring(world, "two")
        late = Late(world, 3, named)
        assert await placed_after_waiting(world, monkeypatch, late) == "h200"
    assert late.samples == 0


async def test_a_measurement_that_never_frees_its_memory_is_not_awaited_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_action, "RECLAIM_WAIT_S", 0.1)
    cluster(world).takes_bytes = 2 * GIB
    on(world, GPU, replace(HOST, node="cpu"))
    async with world.controlled():
        await known(world, "one")
        await measuring(world, "two")
        assert await placed_after_waiting(world, monkeypatch, Late(world, math.inf)) == "cpu"


async def test_a_model_that_does_not_fit_is_refused_at_once_though_others_became_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device shows that memory is returned; measurements end and change their reasons."""
    monkeypatch.setattr(launch_action, "SAMPLED_S", math.inf)
    async with world.controlled():
        await known(world, "one")
        second = world.register("two")
        assert (await world.end(second)).phase is Phase.READY
        monkeypatch.setattr(launch_action, "LOOK_AGAIN_S", 1e6)
        async with asyncio.timeout(20):
            refused = await world.end(world.deploy("one", intent="latSLO", SLOs={"tpot_ms": 1e-9}))
        assert refused.error is not None
        assert refused.error["error"]["code"] == "no_feasible_plan"


def test_reclaimed_memory_is_memory_without_a_promise() -> None:
    """A host whose GPU has an engine: that takes of the host too, and stays."""
    gpu = replace(
        GPU,
        uses=(
            HolderMemory("stays", 5),
            HolderMemory("measuring:k", 7),
            HolderMemory("", 11),
            HolderMemory(None, 13),
        ),
    )
    host = replace(
        HOST,
        node="gpu",
        uses=(
            HolderMemory("stays", 5),
            HolderMemory("went", 7),
            HolderMemory("", 11),
            HolderMemory(None, 13),
        ),
    )
    seen = [replace(d, free_bytes=d.total_bytes - 36) for d in (gpu, host)]
    ledgers = state(NodeLedger("gpu", (Reservation("stays", 1, 0, "h200", 0, 5, 0.0),))).ledgers

    def free(besides: str = "", unnamed_on: Collection[str] = ()) -> list[int]:
        found = reclaimable_memory.reclaimed(Inventory(tuple(seen)), ledgers, besides, unnamed_on)
        return [d.free_bytes - d.total_bytes for d in found.devices]

    assert free() == [-29, -29]
    assert free(unnamed_on=["h200"]) == [-16, -29]
    assert free("stays") == [-24, -24]


@pytest.mark.parametrize(
    ("phase", "at_s", "found"),
    [
        (Phase.READY, 98.0, {"h200"}),
        (Phase.FAILED, 98.0, {"h200"}),
        (Phase.CANCELLED, 98.0, {"h200"}),
        (Phase.READY, 96.0, set()),
        (Phase.PENDING, 98.0, set()),
        (Phase.PROFILING, 98.0, set()),
    ],
)
def test_a_profile_that_waits_or_ended_long_ago_gives_nothing_back(
    phase: Phase, at_s: float, found: set[str]
) -> None:
    profile = ModelProfile("k", "a", "bfloat16", "h200", "0.32.0", phase, updated_at_s=at_s)
    assert reclaimable_memory.measured_lately(state(profile), 100.0, 2.5) == found


def freest(free: Inventory) -> Placement:
    best = max(free.devices, key=lambda d: d.free_bytes)
    if not best.free_bytes:
        raise errors.NoFeasiblePlan("full")
    rank = RankPlacement(0, 0, 0, best.node, best.index, best.kind, 0, 1, 1)
    return replace(PLACED, ranks=(rank,))


def auto_relax(free: Inventory) -> Placement:
    """The more devices have room, the less is relaxed."""
    usable = sum(d.free_bytes > 0 for d in free.devices)
    relaxed = Relaxation(Constraint.LATENCY, 1.0, 2.0, 3.0 - usable, "")
    return replace(freest(free), choice=Choice(relaxed=(relaxed,)))


FULL, IDLE = replace(GPU, node="a", free_bytes=0), replace(GPU, node="a", free_bytes=5)
OTHER, TAKEN = replace(GPU, node="b", free_bytes=9), replace(GPU, node="b", free_bytes=0)


@pytest.mark.parametrize(
    ("now", "reclaimed", "awaited"),
    [
        ((FULL, OTHER), (IDLE, OTHER), True),  # less would be relaxed
        ((FULL, OTHER), (FULL, OTHER), False),
        ((IDLE, TAKEN), (replace(IDLE, free_bytes=7), TAKEN), False),  # as good as it will be
        ((FULL, TAKEN), (FULL, TAKEN), True),  # a refusal may be for what was stopped just now
        ((FULL, OTHER), (FULL, TAKEN), False),
    ],
)
def test_newer_samples_are_awaited_for_a_better_place(
    now: tuple[Device, ...], reclaimed: tuple[Device, ...], awaited: bool
) -> None:
    seen, after = (FreeMemory(Inventory(one), Inventory(one), {}) for one in (now, reclaimed))
    found = reclaimable_memory.place_or_resample(auto_relax, seen, after)
    assert (found is None) is awaited
    assert found is None or found.placement == auto_relax(Inventory(now))


@pytest.mark.parametrize(("back", "awaited"), [(IDLE, True), (FULL, False)])
def test_no_measuring_is_in_the_way_of_what_finds_its_place_a_moment_later(
    back: Device, awaited: bool
) -> None:
    """One is measured on `b`; of `a` memory is given back."""
    measured = {key_of(OTHER): "k"}
    seen = FreeMemory(Inventory((FULL, TAKEN)), Inventory((FULL, OTHER)), measured)
    after = FreeMemory(Inventory((back, TAKEN)), Inventory((back, OTHER)), measured)
    found = reclaimable_memory.place_or_resample(freest, seen, after)
    assert (found is None) is awaited
    assert found is None or found.victims == ("k",)
