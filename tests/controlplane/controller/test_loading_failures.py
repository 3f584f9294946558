"""Variants that an engine does not take: a refusal ends the deployment, what may pass is tried again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from controlplane import errors
from controlplane.controller import deployment_actions
from controlplane.planning import rebalancing, retrying
from controlplane.planning.retrying import RetryLimits
from controlplane.state.records import Deployment, Operation, OperationEvent, Phase
from controlplane.state.repository import Put, Versioned
from profiler.errors import CheckpointError
from testkit.controlplane.world import World
from testkit.in_memory import cancel
from workers.bus.faults import LoadFailed
from workers.messages import VariantRef

pytestmark = pytest.mark.usefixtures("hurry", "quick")

TORN = "/files/v1/adapter_model.safetensors no longer has its 4 bytes; copy it again"
DIED = errors.EngineFailed("the engine of 'base' died during this call; it is being restarted, try again")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> RetryLimits:
    """The usual number of attempts, with pauses of 10, 20, 40 ... ms."""
    limits = RetryLimits(first_pause_s=0.01)
    monkeypatch.setattr(retrying, "LOADING", limits)
    return limits


def loads(world: World, name: str) -> int:
    return sum(variant == name for _, variant in world.cluster.loads)


def error_of(operation: Operation) -> dict[str, Any]:
    assert operation.phase is Phase.FAILED
    assert operation.error is not None
    error: dict[str, Any] = operation.error["error"]
    return error


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (CheckpointError(TORN), "source_unreadable"),
        (
            ValueError("the variant needs 9 bytes, only 4 are set aside; place its base anew"),
            "adapter_mismatch",
        ),
    ],
)
async def test_a_variant_that_an_engine_refuses_is_tried_once(
    world: World, fault: ValueError, code: str
) -> None:
    world.cluster.faults["v1"] = fault
    async with world.controlled():
        await world.up("v2")
        await world.end(world.register("v1", "base"))
        failed = await world.end(world.deploy("v1"))
        assert loads(world, "v1") == 1
        error = error_of(failed)
        assert (error["code"], error["param"], error["message"]) == (code, "adapter", str(fault))
        assert failed.reason == str(fault)
        state = world.repository.read()
        assert set(state.deployments) == {"base", "v2"}
        assert state.models["v1"].record.phase is Phase.READY
        # The file is mended: the same registration is deployed.
        del world.cluster.faults["v1"]
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED


@pytest.mark.parametrize("fault", [DIED, LoadFailed("out of memory"), ConnectionResetError("peer is gone")])
async def test_a_temporary_failure_is_retried_until_it_passes(
    world: World, pauses: RetryLimits, fault: Exception
) -> None:
    """The operation says why meanwhile."""
    world.cluster.faults["v1"] = fault
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
        begun = world.deploy("v1")
        await world.until(lambda: loads(world, "v1") >= 2)
        del world.cluster.faults["v1"]
        done = await world.end(begun)
    assert done.phase is Phase.DEPLOYED
    said = [event.message for event in done.events]
    assert any(m.startswith(f"attempt 1 of {pauses.attempts} failed (") for m in said), said
    assert all(retrying.cause(fault).split(": ")[-1] in m for m in said if " failed (" in m), said
    assert any(f"attempt 2 of {pauses.attempts}; the last attempt failed: " in m for m in said), said
    deployment = world.repository.read().deployments["v1"].record
    assert (deployment.loading.failures, deployment.reason) == (0, "")


@pytest.mark.parametrize("fault", [DIED, LoadFailed("out of memory")])
async def test_a_lasting_failure_ends_the_deployment(
    world: World, pauses: RetryLimits, fault: Exception
) -> None:
    """Failed, after as many attempts as there may be, with the last reason; others are served meanwhile."""
    world.cluster.faults["v1"] = fault
    async with world.controlled():
        await world.up("v2")
        await world.end(world.register("v1", "base"))
        failed = await world.end(world.deploy("v1"))
        assert loads(world, "v1") == pauses.attempts
        message = error_of(failed)["message"]
        assert message.startswith(f"{pauses.attempts} attempts within ")
        assert retrying.cause(fault).split(": ")[-1] in message
        assert message.endswith("`ostinato logs base` shows why, then deploy 'v1' again")
        assert error_of(failed)["code"] == "engine_failed"
        assert {d.record.phase for d in world.repository.read().deployments.values()} == {Phase.DEPLOYED}
        assert (await world.end(world.undeploy("v2"))).phase is Phase.DELETED
        assert (await world.end(world.deploy("v2"))).phase is Phase.DEPLOYED


async def test_a_restarted_controller_counts_on(world: World, pauses: RetryLimits) -> None:
    world.cluster.faults["v1"] = DIED
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
    begun = world.deploy("v1")
    for attempt in range(1, pauses.attempts + 1):
        async with world.controlled():
            await world.until(lambda n=attempt: loads(world, "v1") >= n)  # type: ignore[misc]
    async with world.controlled():
        error_of(await world.end(begun))
    # An attempt is counted when it has failed: one that was killed on the way is made again.
    assert pauses.attempts <= loads(world, "v1") <= 2 * pauses.attempts


async def test_a_deployment_that_waits_for_its_next_attempt_can_be_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "LOADING", RetryLimits(first_pause_s=3600, max_pause_s=3600, total_s=1e6))
    world.cluster.faults["v1"] = DIED
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
        begun = world.deploy("v1")

        def deployments() -> Mapping[str, Versioned[Deployment]]:
            return world.repository.read().deployments

        await world.until(lambda: "v1" in deployments() and deployments()["v1"].record.reason)
        waiting = deployments()["v1"].record
        assert waiting.reason == (
            "attempt 1 of 5 failed (the engine of 'base' died during this call); "
            f"the next attempt begins after {round(retrying.pause_s(1, retrying.LOADING, 'v1'), 1):g} s"
        )
        assert world.repository.read().operations[begun.id].record.reason == waiting.reason
        cancel(world.repository, begun.id)
        assert (await world.end(begun)).phase is Phase.CANCELLED
        assert loads(world, "v1") == 1
        assert set(deployments()) == {"base"}


async def test_engines_that_took_what_another_one_refuses_give_it_back(world: World) -> None:
    refusing = world.cluster.load_variant

    async def load_variant(group_id: str, variant: VariantRef) -> None:
        await refusing(group_id, variant)
        if group_id != "base":
            raise errors.SourceUnreadable(TORN)

    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.register("v1", "base"))
        await world.end(world.deploy("base", replicas={"min": 2, "max": 2}))
        await world.until(lambda: len(world.repository.read().deployments["base"].record.serving_ids()) == 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.cluster, "load_variant", load_variant)
            assert error_of(await world.end(world.deploy("v1")))["code"] == "source_unreadable"
            await world.until(lambda: not any(e.loaded for e in world.cluster.engines.values()))
        assert all(not e.worker.engine.variants() for e in world.cluster.engines.values())
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED


@pytest.fixture
def replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that there is has no room for a variant, the next one has."""
    loading = world.cluster.load_variant

    async def load_variant(group_id: str, variant: VariantRef) -> None:
        if group_id == "base":
            raise errors.AdapterMismatch("'v1' needs 9 bytes, only 4 are set aside; place its base anew")
        await loading(group_id, variant)

    monkeypatch.setattr(world.cluster, "load_variant", load_variant)
    monkeypatch.setattr(deployment_actions, "LOOK_S", 0.01)
    world.cluster.held.add("base@1")


def renew(world: World) -> None:
    versioned = world.repository.read().deployments["base"]
    world.repository.commit([Put(rebalancing.renewed(versioned.record), versioned.version)])


def messages(world: World, operation: Operation) -> list[str]:
    return [event.message for event in world.repository.read().operations[operation.id].record.events]


WAITING = "'v1' waits for base@1: 'v1' needs 9 bytes, only 4 are set aside"


@pytest.mark.usefixtures("replaced")
async def test_a_variant_that_fits_the_successor_engine_waits_for_it(world: World) -> None:
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
        renew(world)
        begun = world.deploy("v1")
        await world.until(lambda: WAITING in messages(world, begun))
        world.cluster.held.clear()
        assert (await world.end(begun)).phase is Phase.DEPLOYED
        assert set(world.cluster.engines["base@1"].loaded) == {"v1"}


@pytest.mark.usefixtures("replaced")
async def test_a_variant_is_refused_if_the_successor_engine_does_not_start(world: World) -> None:
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
        renew(world)
        begun = world.deploy("v1")
        await world.until(lambda: WAITING in messages(world, begun))
        world.cluster.broken.add("base")
        world.cluster.held.clear()
        error = error_of(await world.end(begun))
        assert error["code"] == "adapter_mismatch"
        assert error["message"].endswith("; place its base anew")


@pytest.mark.usefixtures("replaced")
async def test_a_deployment_that_waits_for_an_engine_can_be_cancelled(world: World) -> None:
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
        renew(world)
        begun = world.deploy("v1")
        await world.until(lambda: WAITING in messages(world, begun))
        cancel(world.repository, begun.id)
        assert (await world.end(begun)).phase is Phase.CANCELLED


async def test_damaged_files_are_refused_while_an_engine_is_replaced(world: World) -> None:
    world.cluster.faults["v1"] = CheckpointError(TORN)
    world.cluster.held.add("base@1")
    async with world.controlled():
        await world.up()
        await world.end(world.register("v1", "base"))
        renew(world)
        assert error_of(await world.end(world.deploy("v1")))["code"] == "source_unreadable"


async def test_a_failed_action_shows_in_its_operation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and whatever it fails with."""
    away = True
    unload = world.cluster.unload_variant

    async def unload_variant(group_id: str, variant: VariantRef) -> None:
        if away:
            raise ConnectionResetError("the engine hung up")
        await unload(group_id, variant)

    monkeypatch.setattr(world.cluster, "unload_variant", unload_variant)
    async with world.controlled():
        await world.up("v1")
        begun = world.undeploy("v1")

        def events() -> tuple[OperationEvent, ...]:
            return world.repository.read().operations[begun.id].record.events

        await world.until(lambda: sum("the engine hung up" in e.message for e in events()) >= 2)
        assert "the controller tries again after" in next(
            e.message for e in events() if "hung up" in e.message
        )
        away = False
        assert (await world.end(begun)).phase is Phase.DELETED
