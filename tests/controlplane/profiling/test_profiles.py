"""Profiles as the controller has them measured: cached, resumed, given up, never in the way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.management.commands import profile_model
from controlplane.profiling import job, progress
from controlplane.profiling.keys import key_of_model, key_on, profiled_device
from controlplane.settings import Settings
from controlplane.state.records import Model, ModelProfile, Phase
from controlplane.state.repository import Repository
from placement.types import Inventory, Unusable
from profiler.types import Basis
from testkit.controlplane.builders import ready_base
from testkit.controlplane.world import World
from testkit.in_memory import CPU, GIB, cancel, submit
from testkit.measured_cluster import HOST, TPOT_S, MeasuredCluster

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def measured(settings: Settings, repository: Repository, files: Path) -> World:
    world = World(settings.model_copy(update={"engine": "vllm"}), repository, files)
    world.cluster = MeasuredCluster()
    return world


def cluster(world: World) -> MeasuredCluster:
    assert isinstance(world.cluster, MeasuredCluster)
    return world.cluster


def known(world: World) -> int:
    return sum(len(profile.measurements) for profile in profiles(world))


def profiles(world: World) -> list[ModelProfile]:
    return [found.record for found in world.repository.read().profiles.values()]


async def test_a_registration_measures_its_architecture(measured: World) -> None:
    async with measured.controlled():
        ended = await measured.end(measured.register("base"))
    assert (ended.phase, ended.progress) == (Phase.READY, 1.0)
    assert "loads measured in" in ended.reason
    phases = [e.phase for e in ended.events]
    assert phases[0] is Phase.PENDING
    assert set(phases[1:-1]) == {Phase.PROFILING}
    assert any("TTFT" in e.message and "TPOT" in e.message for e in ended.events)
    (profile,) = profiles(measured)
    assert profile.phase is Phase.READY
    assert progress.is_whole(profile)
    assert len(profile.measurements) == cluster(measured).told
    assert profile.key.startswith("LlamaForCausalLM-2x12-")
    assert (profile.device, profile.dtype, profile.engine_version) == ("a CPU x2", "float32", "0.32.0")
    assert measured.repository.read().models["base"].record.profile == profile.key


async def test_the_second_model_of_a_shape_costs_nothing(measured: World) -> None:
    async with measured.controlled():
        await measured.end(measured.register("base"))
        assert (await measured.end(measured.register("again", folder="base"))).phase is Phase.READY
        assert (await measured.end(measured.register("v1", "base"))).phase is Phase.READY
    assert len(cluster(measured).orders) == 1
    assert len(profiles(measured)) == 1


async def test_deployments_are_estimated_from_the_profile(measured: World) -> None:
    async with measured.controlled():
        await measured.end(measured.register("base"))
        assert (await measured.end(measured.deploy("base"))).phase is Phase.DEPLOYED
    placement = measured.repository.read().deployments["base"].record.placement
    assert placement is not None
    assert placement.estimate.basis is Basis.PROFILE
    assert placement.estimate.tpot_s == pytest.approx(TPOT_S, rel=0.05)
    assert "from its profile: TTFT" in placement.reason
    assert placement.estimate.memory_bytes[0] > 300 << 20


async def test_estimates_without_a_profile_are_marked_as_rough(measured: World) -> None:
    measured.settings = measured.settings.model_copy(update={"profile_seconds": 0})
    async with measured.controlled():
        await measured.end(measured.register("base"))
        await measured.end(measured.deploy("base"))
    placement = measured.repository.read().deployments["base"].record.placement
    assert placement is not None
    assert placement.estimate.basis is Basis.ROUGH
    assert "roughly, without a profile" in placement.reason
    assert cluster(measured).orders == []


@pytest.mark.parametrize("failure", [errors.ProfilingFailed("it ended with SIGKILL"), OSError("disk full")])
async def test_a_profile_that_fails_loses_nothing_and_is_tried_again(
    measured: World, failure: Exception
) -> None:
    cluster(measured).fails_after, cluster(measured).failure = 1, failure  # a footprint, no time
    async with measured.controlled():
        ended = await measured.end(measured.register("base"))
        assert ended.phase is Phase.READY
        assert "not profiled" in ended.reason
        assert "`ostinato profile base` tries again" in ended.reason
        assert profiles(measured)[0].phase is Phase.FAILED
        assert (await measured.end(measured.deploy("base"))).phase is Phase.DEPLOYED
        cluster(measured).fails_after = 0
        failed = await measured.end(submit(measured.repository, profile_model, "base", False))
        assert failed.phase is Phase.FAILED
        assert failed.error is not None
        assert failed.error["error"]["code"] == "profiling_failed"
        cluster(measured).fails_after = None
        retried = await measured.end(submit(measured.repository, profile_model, "base", False))
    assert retried.phase is Phase.READY
    assert progress.is_whole(profiles(measured)[0])
    assert cluster(measured).told == len(profiles(measured)[0].measurements)  # none of them twice


async def test_measurements_before_a_failure_count(measured: World) -> None:
    cluster(measured).fails_after = 3
    async with measured.controlled():
        ended = await measured.end(measured.register("base"))
        assert (ended.phase, profiles(measured)[0].phase) == (Phase.READY, Phase.READY)
        assert "2 of" in ended.reason
        assert "SIGKILL" in ended.reason
        cluster(measured).fails_after = None
        assert (
            await measured.end(submit(measured.repository, profile_model, "base", False))
        ).phase is Phase.READY
    assert progress.is_whole(profiles(measured)[0])


async def test_a_profile_can_be_measured_again(measured: World) -> None:
    async with measured.controlled():
        await measured.end(measured.register("base"))
        told = cluster(measured).told
        await measured.end(submit(measured.repository, profile_model, "base", False))
        assert cluster(measured).told == told
        await measured.end(submit(measured.repository, profile_model, "base", True))
    assert cluster(measured).told == 2 * told
    first, second = (order.scratch for order in cluster(measured).orders)
    assert first != second  # what the node has kept is not taken for new


async def test_a_controller_that_is_killed_leaves_off_where_its_successor_begins(measured: World) -> None:
    cluster(measured).slow = True
    operation = measured.register("base")
    lives = kept = 0

    def further(than: int) -> bool:
        return known(measured) > than or measured.phase(operation) is Phase.READY

    while measured.phase(operation) is not Phase.READY:
        async with measured.controlled():
            await measured.until(partial(further, kept))
        lives, kept = lives + 1, known(measured)
    assert lives > 1
    profile = profiles(measured)[0]
    assert progress.is_whole(profile)
    assert len(set(profile.measurements)) == len(profile.measurements)
    assert cluster(measured).told < 2 * len(profile.measurements)
    assert cluster(measured).ended == len(cluster(measured).orders)


async def test_a_cancelled_registration_ends_the_measuring(measured: World) -> None:
    cluster(measured).slow = True
    async with measured.controlled():
        operation = measured.register("base")
        await measured.until(lambda: cluster(measured).told >= 1)
        cancel(measured.repository, operation.id)
        assert (await measured.end(operation)).phase is Phase.CANCELLED
        await measured.until(lambda: profiles(measured)[0].phase is Phase.CANCELLED)
        assert cluster(measured).ended == 1
        assert profiles(measured)[0].measurements
        assert measured.repository.read().models == {}
        assert (await measured.end(measured.register("base"))).phase is Phase.READY
    assert progress.is_whole(profiles(measured)[0])


async def test_a_cancelled_profile_leaves_the_model(measured: World) -> None:
    async with measured.controlled():
        await measured.end(measured.register("base"))
        cluster(measured).slow = True
        operation = submit(measured.repository, profile_model, "base", True)
        await measured.until(lambda: cluster(measured).ended < len(cluster(measured).orders))
        cancel(measured.repository, operation.id)
        ended = await measured.end(operation)
        assert ended.phase is Phase.CANCELLED
        assert "finished measurements are kept" in ended.reason
        assert measured.repository.read().models["base"].record.phase is Phase.READY
        await measured.until(lambda: profiles(measured)[0].settled)


async def test_a_profile_needs_a_model_that_is_ready(measured: World) -> None:
    with pytest.raises(errors.ModelNotFound):
        submit(measured.repository, profile_model, "nobody", False)
    measured.register("base")
    with pytest.raises(errors.NotReady):
        submit(measured.repository, profile_model, "base", False)


async def test_a_variant_s_profile_is_that_of_its_base(measured: World) -> None:
    async with measured.controlled():
        await measured.end(measured.register("base"))
        await measured.end(measured.register("v1", "base"))
        operation = submit(measured.repository, profile_model, "v1", False)
        assert operation.target == "base"
        assert (await measured.end(operation)).phase is Phase.READY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"free_bytes": GIB // 2}, "measuring needs"),
        ({"engine": ""}, "vLLM is not installed"),
    ],
)
async def test_the_missing_measurements_are_named(
    measured: World, changes: dict[str, object], said: str
) -> None:
    cluster(measured).devices = Inventory((replace(HOST, **changes),))  # type: ignore[arg-type]
    async with measured.controlled():
        ended = await measured.end(measured.register("base"))
    assert ended.phase is Phase.READY
    assert said in ended.reason
    assert cluster(measured).orders == []


async def test_a_registration_without_devices_measures_nothing(measured: World) -> None:
    cluster(measured).devices = Inventory(())
    async with measured.controlled():
        assert "no device" in (await measured.end(measured.register("base"))).reason
        failed = await measured.end(submit(measured.repository, profile_model, "base", False))
    assert failed.error is not None
    assert failed.error["error"]["code"] == "profiling_failed"


async def test_a_registration_waits_for_the_next_report_of_the_only_node(
    measured: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine reports late: its models have profiles all the same."""
    late = Unusable(HOST.node, "stale report", awaited=f"node {HOST.node} reports again")
    looks = iter([Inventory((), (late,))] * 3)
    of_devices = measured.cluster.inventory

    async def inventory() -> Inventory:
        return next(looks, None) or await of_devices()

    monkeypatch.setattr(measured.cluster, "inventory", inventory)
    async with measured.controlled():
        assert (await measured.end(measured.register("base"))).phase is Phase.READY
    assert next(looks, None) is None
    (found,) = profiles(measured)
    assert progress.is_whole(found)


async def test_the_budget_is_what_is_free_at_most(measured: World) -> None:
    free = 4 * GIB
    cluster(measured).devices = Inventory((replace(HOST, free_bytes=free),))
    async with measured.controlled():
        await measured.end(measured.register("base"))
    (order,) = cluster(measured).orders
    assert order.device_bytes <= free
    assert order.seconds == measured.settings.profile_seconds


def test_the_commonest_gpu_stands_for_all() -> None:
    def gpu(node: str, index: int, model: str, free: int) -> object:
        return replace(CPU, node=node, index=index, kind=model, model=model, free_bytes=free)

    many = Inventory((gpu("a", 0, "L4", 9), gpu("b", 0, "H200", 5), gpu("b", 1, "H200", 7), HOST))  # type: ignore[arg-type]
    found = profiled_device(many)
    assert found is not None
    assert (found.model, found.index) == ("H200", 1)


def test_a_profile_is_measured_on_its_own_kind_of_device(files: Path, settings: Settings) -> None:
    """Since it was asked for, another model has become the commonest."""
    settings = settings.model_copy(update={"engine": "vllm"})
    model = replace(ready_base(files), path=str(files))
    ours = replace(HOST, model="a CPU x4", free_bytes=8 * GIB)
    others = tuple(replace(HOST, node=f"new-{n}", model="a CPU x8", free_bytes=16 * GIB) for n in range(2))
    key = key_on(model, ours, settings)
    assert key is not None
    profile = progress.fresh_profile(key, 1.0)
    assert job.profiling_job(profile, model, Inventory((*others, ours)), settings).node == ours.node
    with pytest.raises(
        errors.ProfilingFailed, match=r"this profile needs a CPU x4 .*which the cluster lacks"
    ):
        job.profiling_job(profile, model, Inventory(others), settings)


def test_profiles_are_of_one_shape_device_dtype_and_engine(files: Path, settings: Settings) -> None:
    model = ready_base(files)

    def key(of: Model = model, dtype: str = "auto", **device: object) -> str:
        inventory = Inventory((replace(HOST, **device),))  # type: ignore[arg-type]
        found = key_of_model(of, inventory, settings.model_copy(update={"engine_dtype": dtype}))
        assert found is not None
        return found.text

    assert model.spec is not None
    other_weights = replace(model, spec=replace(model.spec, fingerprint="another"))
    wider = replace(model, spec=replace(model.spec, hidden_size=16))
    assert key() == key(other_weights)
    keys = [key(), key(wider), key(dtype="bfloat16"), key(model="a CPU x4"), key(engine="0.33.0")]
    assert len(set(keys)) == len(keys)
