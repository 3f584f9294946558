"""The memory that ranks take in addition to their plan: kept, reported, and given to the next plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.management.commands import profile_model
from controlplane.management.schemas.models import DeploymentView
from controlplane.profiling import memory_feedback
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ModelProfile, Phase
from controlplane.state.repository import Repository
from controlplane.state.worker_groups import GroupPhase, MeasuredRank, WorkerGroup
from placement.types import Inventory
from testkit.controlplane import builders
from testkit.controlplane.world import World
from testkit.in_memory import submit
from testkit.measured_cluster import HOST, MeasuredCluster
from workers.messages import RankReport, WorkerReport

pytestmark = pytest.mark.usefixtures("hurry")

MIB = 1 << 20
PROFILE = ModelProfile("k", "a", "bfloat16", "h200", "0.32.0", Phase.READY)
SIZES = st.integers(0, 1000)


def planned_on(profile: ModelProfile, estimate: int) -> tuple[int, WorkerGroup]:
    """The planned memory of a rank with this estimate, and its group."""
    excess = profile.memory_excess.get("1x1", 0)
    return estimate + excess, WorkerGroup(0, GroupPhase.SERVING, builders.PLACED, (), excess)


@given(needs=st.lists(SIZES, min_size=1, max_size=5), estimate=SIZES)
def test_the_next_plan_has_what_the_last_one_took_and_never_less_than_estimated(
    needs: list[int], estimate: int
) -> None:
    profile = PROFILE
    for took in needs:
        planned, group = planned_on(profile, estimate)
        profile = memory_feedback.corrected(
            profile, replace(group, measured=(MeasuredRank(0, planned, took),))
        )
        assert planned_on(profile, estimate)[0] == max(estimate, took)


@given(needs=SIZES, estimate=SIZES)
def test_two_deployments_planned_alike_do_not_teach_the_same_twice(needs: int, estimate: int) -> None:
    planned, group = planned_on(PROFILE, estimate)
    profile = PROFILE
    for _ in range(2):
        profile = memory_feedback.corrected(
            profile, replace(group, measured=(MeasuredRank(0, planned, needs),))
        )
    assert planned_on(profile, estimate)[0] == max(estimate, needs)


def test_the_rank_that_exceeds_its_plan_most_counts_and_shapes_are_apart() -> None:
    ranks = (MeasuredRank(0, 100, 90), MeasuredRank(1, 100, 130), MeasuredRank(2, 200, 210))
    group = WorkerGroup(0, GroupPhase.SERVING, builders.PLACED, ranks)
    known = replace(PROFILE, memory_excess={"2x1": 5})
    assert memory_feedback.corrected(known, group).memory_excess == {"2x1": 5, "1x1": 30}


@pytest.fixture
def world(settings: Settings, repository: Repository, files: Path) -> World:
    world = World(settings.model_copy(update={"engine": "vllm"}), repository, files)
    world.cluster = MeasuredCluster()
    return world


def taking(world: World, more: int) -> Any:
    """Reports of engines whose ranks take this much more than planned."""
    real = world.cluster.reports

    async def reports(base: str) -> list[WorkerReport]:
        placement = world.repository.read().deployments[base].record.placement
        assert placement is not None
        ranks = tuple(
            RankReport(r.rank, 1, r.node, r.device_kind, r.device_index, 2, size, 0, 0, 0, size + more)
            for r in placement.ranks
            for size in [r.memory_bytes]
        )
        return [replace(report, ranks=ranks) for report in await real(base)]

    return reports


async def deployed(world: World) -> Deployment:
    assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
    return world.repository.read().deployments["base"].record


async def test_a_deployment_that_takes_more_than_planned_teaches_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.cluster, "reports", taking(world, 7 * MIB))
    async with world.controlled():
        await world.end(world.register("base"))
        first = await deployed(world)
        operation = next(
            o.record for o in world.repository.read().operations.values() if o.record.kind == "deploy_model"
        )
        assert first.placement is not None
        planned = [r.memory_bytes for r in first.placement.ranks]
        assert [(r.planned_bytes, r.measured_bytes) for r in first.groups[0].measured] == [
            (size, size + 7 * MIB) for size in planned
        ]
        assert operation.events[-1].message.startswith("the engine answers; rank 0: planned ")
        view = DeploymentView.of(first).plan
        assert view is not None
        assert [r.measuredBytes for r in view.ranks] == [size + 7 * MIB for size in planned]
        await world.end(world.undeploy("base"))
        monkeypatch.setattr(world.cluster, "reports", taking(world, 0))
        for _ in range(2):  # it took what it was planned with: nothing to add
            second = await deployed(world)
            assert second.placement is not None
            assert [r.memory_bytes for r in second.placement.ranks] == [size + 7 * MIB for size in planned]
            await world.end(world.undeploy("base"))


async def test_an_engine_without_memory_reports_is_deployed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reports(base: str) -> list[WorkerReport]:
        raise errors.EngineFailed("it is busy")

    monkeypatch.setattr(world.cluster, "reports", reports)
    async with world.controlled():
        await world.end(world.register("base"))
        assert (await deployed(world)).groups[0].measured == ()


async def test_a_plan_without_a_calibration_corrects_no_profile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would be given to the next plan, so each deployment would teach the same excess once more."""
    cluster = world.cluster
    assert isinstance(cluster, MeasuredCluster)
    cluster.fails_after = 0
    monkeypatch.setattr(cluster, "reports", taking(world, 300 * MIB))
    async with world.controlled():
        await world.end(world.register("base"))
        plans = []
        for _ in range(3):
            made = await deployed(world)
            assert made.placement is not None
            plans.append([r.memory_bytes for r in made.placement.ranks])
            (profile,) = world.repository.read().profiles.values()
            assert (profile.record.phase, profile.record.memory_excess) == (Phase.FAILED, {})
            await world.end(world.undeploy("base"))
        assert plans[0] == plans[1] == plans[2]


async def test_a_plan_made_before_the_calibration_teaches_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was estimated roughly: what its ranks took beyond that is not what the calibration lacks."""
    cluster = world.cluster
    assert isinstance(cluster, MeasuredCluster)
    cluster.fails_after = 0
    cluster.held.add("base")
    monkeypatch.setattr(cluster, "reports", taking(world, 300 * MIB))
    async with world.controlled():
        await world.end(world.register("base"))
        deploying = world.deploy("base")
        await world.until(lambda: "base" in cluster.engines)
        cluster.fails_after = None
        measured = await world.end(submit(world.repository, profile_model, "base", True))
        assert measured.phase is Phase.READY
        cluster.held.clear()
        assert (await world.end(deploying)).phase is Phase.DEPLOYED
        (profile,) = world.repository.read().profiles.values()
        assert profile.record.memory_excess == {}


async def test_hosts_of_several_types_teach_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are estimated as the quickest, so what a slower one was given is not what its own profile says."""
    monkeypatch.setattr(world.cluster, "reports", taking(world, 300 * MIB))
    rates = replace(HOST.rates, memory_bytes_per_s=HOST.rates.memory_bytes_per_s * 2)
    quicker = replace(HOST, node="other", model="a CPU x8", free_bytes=0, rates=rates)
    async with world.controlled():
        await world.end(world.register("base"))
        world.cluster.devices = Inventory((HOST, quicker))
        for _ in range(2):
            made = await deployed(world)
            assert made.placement is not None
            assert made.placement.ranks[0].node == HOST.node
            assert [p.record.memory_excess for p in world.repository.read().profiles.values()] == [{}]
            await world.end(world.undeploy("base"))
