"""The controller, real, on a real store, over an in-memory cluster: and killed at any point."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as bounded
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.controller.child_process import ReaderDied
from controlplane.controller.controller import MAX_READS, Controller
from controlplane.controller.file_reader import FileReader
from controlplane.controller.metrics import ControllerMetrics
from controlplane.management.commands import delete_model
from controlplane.planning import retrying
from controlplane.planning.reconcile import KEEP_KEYS_S, Observed, reconcile
from controlplane.planning.retrying import RetryLimits
from controlplane.settings import Settings
from controlplane.state import Changes, Entry, Lease, Require, Snapshot, StateStore, Write
from controlplane.state.records import Deployment, IdempotencyKey, Model, Operation, OperationKind, Phase
from controlplane.state.repository import Put, Repository
from controlplane.state.stores import open_store
from controlplane.state.transactions import Superseded
from controlplane.state.worker_groups import GroupPhase
from placement.types import Inventory
from testkit.controlplane.world import World, placed, reserved
from testkit.in_memory import InMemoryCluster, cancel, submit

pytestmark = pytest.mark.usefixtures("hurry")


async def test_a_repeated_failure_is_logged_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd = type(f"Odd{time.time_ns()}", (Exception,), {})  # repeated lines are logged once a minute
    failed: list[Exception] = []

    async def fail() -> None:
        failed.append(odd())
        raise failed[-1]

    monkeypatch.setattr(world.cluster, "observe", fail)
    async with world.controlled():
        await world.until(lambda: len(failed) >= 3)
    (told,) = [record for record in caplog.records if record.getMessage().startswith("reconciling failed")]
    assert odd.__name__ in told.getMessage()
    assert told.exc_info is not None


async def test_a_deployment_lives_from_registration_to_deletion(world: World) -> None:
    async with world.controlled():
        registered = await world.end(world.register("base"))
        assert (registered.phase, registered.progress) == (Phase.READY, 1.0)
        assert (await world.end(world.register("v1", "base"))).phase is Phase.READY
        deployed = await world.end(world.deploy("v1"))
        assert deployed.phase is Phase.DEPLOYED
        messages = [e.message for e in deployed.events]
        assert any("starting the engine" in m for m in messages)
        assert "loading the variant into the engine of 'base'" in messages
        assert set(world.cluster.engines["base"].loaded) == {"v1"}
        assert (await world.end(world.undeploy("v1"))).phase is Phase.DELETED
        assert world.cluster.engines["base"].loaded == {}
        assert (await world.end(world.undeploy("base"))).phase is Phase.DELETED
        assert world.cluster.engines == {}
        for name in ("v1", "base"):
            submit(world.repository, delete_model, name)
    state = world.repository.read()
    assert (state.models, state.deployments) == ({}, {})


async def test_an_engine_is_launched_once(world: World) -> None:
    async with world.controlled():
        await world.up("v1", "v2")
        await asyncio.sleep(0.1)
    assert world.cluster.launches == ["base"]


async def test_a_launch_that_fails_leaves_nothing(world: World) -> None:
    world.cluster.broken.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.register("v1", "base"))
        failed = await world.end(world.deploy("v1"))
        assert failed.error is not None
        assert failed.error["error"]["code"] == "engine_failed"
        assert "out of memory" in failed.error["error"]["message"]
        await world.until(lambda: not world.repository.read().deployments and not world.cluster.engines)
        assert set(world.repository.read().models) == {"base", "v1"}
        world.cluster.broken.clear()
        assert (await world.end(world.deploy("v1"))).phase is Phase.DEPLOYED


async def test_an_intent_that_cannot_be_met(world: World) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        failed = await world.end(world.deploy("base", intent="accSLO", SLOs={"accuracy": 100}))
        assert failed.phase is Phase.DEPLOYED
        await world.end(world.undeploy("base"))
        failed = await world.end(world.deploy("base", intent="latSLO", SLOs={"e2e_ms": 1e-9}))
    assert failed.error is not None
    assert failed.error["error"]["code"] == "no_feasible_plan"
    assert world.repository.read().deployments == {}


async def test_an_adapter_the_engine_refuses(world: World) -> None:
    world.cluster.refused.add("v1")
    async with world.controlled():
        await world.up("v2")
        await world.end(world.register("v1", "base"))
        failed = await world.end(world.deploy("v1"))
    assert failed.error is not None
    assert failed.error["error"]["code"] == "adapter_mismatch"
    assert set(world.repository.read().deployments) == {"base", "v2"}


@pytest.mark.parametrize(
    ("folder", "base", "code"),
    [
        ("missing", None, "source_unreadable"),
        ("torn", None, "source_unreadable"),
        ("../..", None, "path_not_allowed"),
        ("nul\0", None, "invalid_request"),
        ("long" * 100, None, "source_unreadable"),
        ("wide", "base", "adapter_mismatch"),
        ("strange", "base", "adapter_mismatch"),
        ("nan", "base", "source_unreadable"),
    ],
)
async def test_nothing_is_half_registered(world: World, folder: str, base: str | None, code: str) -> None:
    async with world.controlled():
        await world.end(world.register("base"))
        failed = await world.end(world.register("x", base, folder))
        assert failed.phase is Phase.FAILED
        assert failed.error is not None
        assert failed.error["error"]["code"] == code
        assert set(world.repository.read().models) == {"base"}
        good = await world.end(world.register("x", "base", "v1"))
    assert good.phase is Phase.READY


async def test_an_unexpected_error_ends_a_registration(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*args: Any) -> Model:
        raise ZeroDivisionError

    monkeypatch.setattr(FileReader, "read_now", profile)
    async with world.controlled():
        failed = await world.end(world.register("base"))
    assert failed.error is not None
    assert failed.error["error"]["code"] == "internal_error"
    assert world.repository.read().models == {}


async def test_files_that_kill_what_reads_them_are_read_three_times(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def killed(*args: Any) -> Model:
        counts.append(world.repository.read().models["base"].record.reads)
        raise ReaderDied("its process was killed by SIGKILL")

    with monkeypatch.context() as patched:
        patched.setattr(FileReader, "read_now", killed)
        async with world.controlled():
            failed = await world.end(world.register("base"))
    assert counts == [1, 2, 3]  # each is in the record before it begins
    assert failed.error is not None
    assert failed.error["error"]["code"] == "source_unreadable"
    assert "failed 3 times" in failed.reason
    assert "SIGKILL" in failed.reason
    assert world.repository.read().models == {}
    async with world.controlled():
        assert (await world.end(world.register("base"))).phase is Phase.READY
    assert world.repository.read().models["base"].record.reads == 0


async def test_a_successor_of_killed_controllers_reads_no_file_a_fourth_time(world: World) -> None:
    operation = world.register("base")
    versioned = world.repository.read().models["base"]
    tried = replace(versioned.record, phase=Phase.PROFILING, reads=MAX_READS)  # as three controllers left it
    world.repository.commit([Put(tried, versioned.version)])
    async with world.controlled():
        failed = await world.end(operation)
    assert failed.phase is Phase.FAILED
    assert "the controller ended" in failed.reason


async def test_a_controller_that_must_end_counts_no_failed_read(
    world: World, slow_profile: threading.Event
) -> None:
    operation = world.register("base")
    for _ in range(MAX_READS + 1):
        async with world.controlled():
            await world.until(lambda: world.repository.read().models["base"].record.reads == 1)
        await world.until(lambda: world.repository.read().models["base"].record.reads == 0)
    slow_profile.set()
    async with world.controlled():
        assert (await world.end(operation)).phase is Phase.READY


@pytest.fixture
def slow_profile(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Profiling waits for this event."""
    release, real = threading.Event(), FileReader.read_now

    def profile(*args: Any) -> Model:
        release.wait(5)
        return real(*args)

    monkeypatch.setattr(FileReader, "read_now", profile)
    yield release
    release.set()


async def test_a_registration_can_be_cancelled(world: World, slow_profile: threading.Event) -> None:
    async with world.controlled():
        operation = world.register("base")
        await world.until(lambda: world.phase(operation) is Phase.PROFILING)
        cancel(world.repository, operation.id)
        assert (await world.end(operation)).phase is Phase.CANCELLED
        assert world.repository.read().models == {}
        again = world.register("base")  # the first one is still being read
        slow_profile.set()
        assert (await world.end(again)).phase is Phase.READY
        assert world.repository.read().models["base"].record.phase is Phase.READY


async def test_a_deployment_can_be_cancelled(world: World) -> None:
    world.cluster.held.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.register("v1", "base"))
        operation, waiting = world.deploy("base"), world.deploy("v1")
        await world.until(lambda: "base" in world.cluster.engines)
        cancel(world.repository, operation.id)
        assert (await world.end(operation)).phase is Phase.CANCELLED
        assert (await world.end(waiting)).phase is Phase.FAILED
        await world.until(lambda: not world.cluster.engines)
        assert world.repository.read().deployments == {}


async def test_cancelling_a_variant_leaves_its_base(world: World) -> None:
    world.cluster.held.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        await world.end(world.register("v1", "base"))
        operation = world.deploy("v1")
        await world.until(lambda: "base" in world.cluster.engines)
        cancel(world.repository, operation.id)
        assert (await world.end(operation)).phase is Phase.CANCELLED
        world.cluster.held.clear()
        await world.until(lambda: world.repository.read().deployments["base"].record.phase is Phase.DEPLOYED)
        assert set(world.repository.read().deployments) == {"base"}


async def test_undeploying_twice_and_while_deploying(world: World) -> None:
    world.cluster.held.add("base")
    async with world.controlled():
        await world.end(world.register("base"))
        deploying = world.deploy("base")
        operations = [world.undeploy("base"), world.undeploy("base")]
        cancel(world.repository, deploying.id)
        assert [(await world.end(o)).phase for o in operations] == [Phase.DELETED] * 2
        assert (await world.end(deploying)).phase is Phase.CANCELLED


async def test_a_lost_engine_is_launched_again(world: World) -> None:
    async with world.controlled():
        await world.up("v1")
        world.cluster.engines.clear()
        await world.until(lambda: world.cluster.launches == ["base", "base"])
        await world.until(lambda: world.repository.read().deployments["base"].record.phase is Phase.DEPLOYED)
    assert world.repository.read().deployments["v1"].record.phase is Phase.DEPLOYED


async def test_a_cluster_that_comes_back_piece_by_piece_loses_no_deployment(world: World) -> None:
    devices = world.cluster.devices
    async with world.controlled():
        await world.up("v1")
        world.cluster.devices = type(devices)(())  # its nodes have not joined yet
        world.cluster.broken.add("base")
        world.cluster.engines.clear()
        await world.until(lambda: world.repository.read().deployments["base"].record.reason)
        world.cluster.devices = devices
        await world.until(lambda: len(world.cluster.launches) > 2)  # starts, fails, starts again
        world.cluster.broken.clear()
        await world.until(lambda: world.repository.read().deployments["base"].record.phase is Phase.DEPLOYED)
    assert set(world.repository.read().deployments) == {"base", "v1"}


async def test_a_deployed_model_without_a_place_reserves_nothing_and_logs_why_once(world: World) -> None:
    def base() -> Deployment:
        return world.repository.read().deployments["base"].record

    async with world.controlled():
        await world.up("v1")
        world.lose("node", "other")
        await world.until(lambda: base().groups[0].refused_on)
        await world.until(lambda: world.repository.read().deployments["v1"].record.reason)
        assert (base().phase, base().placement, base().established) == (Phase.DEPLOYING, None, True)
        assert "node node is gone" in base().reason
        state = world.repository.read()
        assert state.ledgers == {}
        variant = state.deployments["v1"].record
        assert variant.phase is Phase.DEPLOYED
        assert "node node is gone" in variant.reason
        await asyncio.sleep(0.2)
        assert world.repository.revision() == state.revision
        world.find()
        await world.until(lambda: base().phase is Phase.DEPLOYED)
    state = world.repository.read()
    assert reserved(state) == placed(state) != set()
    assert [d.record.reason for d in state.deployments.values()] == ["", ""]


async def test_the_store_may_be_away_for_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    away = True
    real = world.repository.read

    def read() -> Any:
        if away:
            raise errors.Unavailable("the store is away")
        return real()

    operation = world.register("base")
    monkeypatch.setattr(world.repository, "read", read)
    async with world.controlled():
        await asyncio.sleep(0.05)
        away = False
        assert (await world.end(operation)).phase is Phase.READY


# --- killed at any point -------------------------------------------------------------------------


class Killed(BaseException):
    """kill -9."""


class Fuse:
    """Counts what a controller does to the outside; at zero it dies, and nothing it does counts."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


async def test_keys_of_more_than_a_day_ago_go(world: World) -> None:
    now_s = time.time()
    keys = {"old": now_s - KEEP_KEYS_S - 60, "new": now_s - KEEP_KEYS_S + 3600}
    world.repository.commit([Put(IdempotencyKey(name, "", "op", at_s), 0) for name, at_s in keys.items()])
    async with world.controlled():
        await world.until(lambda: world.repository.get(IdempotencyKey, "old") is None)
    assert world.repository.get(IdempotencyKey, "new") is not None


class FusedStore:
    """A store whose writer dies before, or right after, a commit."""

    def __init__(self, store: StateStore, fuse: Fuse) -> None:
        self._store, self._fuse = store, fuse

    def revision(self) -> int:
        return self._store.revision()

    def snapshot(self, kinds: Sequence[str]) -> Snapshot:
        return self._store.snapshot(kinds)

    def get(self, kind: str, key: str) -> Entry | None:
        return self._store.get(kind, key)

    def changes(self, kinds: Sequence[str], since: int) -> Changes | None:
        return self._store.changes(kinds, since)

    def pages(self, kind: str) -> Iterator[Mapping[str, Entry]]:
        return self._store.pages(kind)

    def commit(self, writes: Sequence[Write | Require], lease: Lease | None = None) -> int:
        self._fuse.burn()
        revision = self._store.commit(writes, lease)
        self._fuse.burn()
        return revision

    def take_lease(self, name: str, holder: str, seconds: float, gone: str | None = None) -> Lease:
        return self._store.take_lease(name, holder, seconds, gone)

    def release_lease(self, lease: Lease) -> None:
        self._store.release_lease(lease)

    def close(self) -> None: ...


class FusedCluster:
    """A cluster whose caller dies before, or right after, a call that changes it."""

    def __init__(self, cluster: InMemoryCluster, fuse: Fuse) -> None:
        self._cluster, self._fuse = cluster, fuse

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._cluster, name)
        if name not in ("launch", "stop", "load_variant", "unload_variant"):
            return real

        async def fused(*args: Any) -> Any:
            self._fuse.burn()
            result = await real(*args)
            self._fuse.burn()
            return result

        return fused


COMMANDS = st.lists(
    st.sampled_from(
        [
            *[("register", n) for n in ("base", "v1", "torn")],
            *[("deploy", n) for n in ("base", "v1", "base", "v1")],
            ("deploy two", "base"),
            ("lose", "node"),
            ("lose", "other"),
            ("find", ""),
            *[("undeploy", n) for n in ("base", "v1")],
            ("delete", "v1"),
            ("cancel", ""),
            ("break", ""),
            ("mend", ""),
            ("settle", ""),
            ("settle", ""),
        ]
    ),
    min_size=4,
    max_size=16,
)


async def play(world: World, script: list[tuple[str, str]], lives: list[int]) -> None:
    """The user's commands, one per step of a controller that dies as `lives` says."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the dead say nothing
    store = world.repository._store
    remaining = list(lives)

    def born() -> tuple[Controller, Fuse]:
        fuse = Fuse(remaining.pop() if remaining else 10**9)
        cluster: Any = FusedCluster(world.cluster, fuse)
        metrics = ControllerMetrics(CollectorRegistry())
        return Controller(world.settings, Repository(FusedStore(store, fuse)), cluster, metrics), fuse

    controller, fuse = born()

    async def step(settle: bool) -> None:
        nonlocal controller, fuse
        await controller.step()
        if settle:
            await controller.settle()
        await asyncio.sleep(0)
        if fuse.left < 0:
            await controller.settle()
            controller, fuse = born()

    await step(True)
    for command, name in script:
        with contextlib.suppress(errors.OstinatoError):
            order(world, command, name)
        await step(command == "settle")
    for _ in range(60):
        await step(True)
        nodes = await world.cluster.nodes()
        observed = Observed(await world.cluster.observe(), frozenset(), time.time() + 60, nodes)
        if not reconcile(world.repository.read(), observed):
            return
        await asyncio.sleep(0.005)  # a group may have to wait for its next attempt
    pytest.fail(f"no fixed point: {reconcile(world.repository.read(), observed)}")


def order(world: World, command: str, name: str) -> None:
    state = world.repository.read()
    match command:
        case "register":
            world.register(name, "base" if name == "v1" else None)
        case "deploy":
            world.deploy(name)
        case "deploy two":
            world.deploy(name, replicas={"min": 2, "max": 2})
        case "lose":
            world.lose(name)
        case "find":
            world.find()
        case "undeploy":
            world.undeploy(name)
        case "delete":
            submit(world.repository, delete_model, name)
        case "break":
            world.cluster.broken.add("base")
        case "mend":
            world.cluster.broken.clear()
        case "cancel":
            for o in state.operations.values():
                if not o.record.done:
                    cancel(world.repository, o.record.id)


def check(world: World) -> None:
    state = world.repository.read()
    operations = sorted((o.record for o in state.operations.values()), key=lambda o: o.created_at_s)
    assert [o for o in operations if not o.done] == []
    assert {m.record.phase for m in state.models.values()} <= {Phase.READY}
    assert {d.record.phase for d in state.deployments.values()} <= {Phase.DEPLOYED}
    groups = [g for d in state.deployments.values() for g in d.record.groups]
    assert {g.phase for g in groups} <= {GroupPhase.SERVING}
    assert set(world.cluster.engines) == {n for d in state.deployments.values() for n in d.record.group_ids()}
    for engine in world.cluster.engines.values():
        assert engine.view.status is EngineStatus.RUNNING
    assert all(d in state.models for d in state.deployments)
    assert reserved(state) == placed(state)
    last: dict[tuple[str, bool], Operation] = {}
    for o in operations:
        about_model = o.kind in (OperationKind.REGISTER, OperationKind.DELETE)
        if o.phase in (Phase.READY, Phase.DEPLOYED, Phase.DELETED):
            last[o.target, about_model] = o
    for (target, about_model), o in last.items():
        there = target in (state.models if about_model else state.deployments)
        if o.phase is Phase.DELETED and target == "base" and not about_model:
            continue  # a variant may have brought it back
        assert there == (o.phase is not Phase.DELETED), o


@bounded(max_examples=bounded().max_examples * 3 // 5, suppress_health_check=list(HealthCheck))
@given(script=COMMANDS, lives=st.lists(st.integers(0, 12), max_size=6))
def test_killed_anywhere_a_successor_ends_everything(
    script: list[tuple[str, str]],
    lives: list[int],
    settings: Settings,
    files: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("state")
    store = open_store(f"sqlite://{folder}/state.db")
    world = World(settings, Repository(store), files)
    script = [("register", "base"), ("settle", ""), ("register", "v1"), ("settle", ""), *script]
    script += [("mend", ""), ("find", "")]
    try:
        asyncio.run(play(world, script, lives))
        check(world)
    finally:
        store.close()


async def test_a_controller_that_is_killed_while_an_action_runs_has_a_successor(world: World) -> None:
    """The same with the real loop, cut off at arbitrary moments."""
    operations: list[Operation] = []
    orders: list[Callable[[], Operation]] = [
        lambda: world.register("base"),
        lambda: world.register("v1", "base"),
        lambda: world.deploy("v1"),
        lambda: world.undeploy("v1"),
    ]
    for order_next in orders:
        operations.append(order_next())
        for n in range(12):
            async with world.controlled():
                await asyncio.sleep(0.003 * n)
        async with world.controlled():
            await world.end(operations[-1])
    assert [world.phase(o) for o in operations] == [Phase.READY, Phase.READY, Phase.DEPLOYED, Phase.DELETED]
    assert set(world.cluster.engines) == {"base"}


async def test_a_killed_controllers_thread_that_comes_late_reads_no_model_again(world: World) -> None:
    """It would be Profiling after its registration has ended, and its variants refused."""
    async with world.controlled():
        await world.end(world.register("base"))
    late = Controller(world.settings, world.repository, world.cluster, ControllerMetrics(CollectorRegistry()))
    with pytest.raises(Superseded):
        await late._read_model("base")
    assert world.repository.read().models["base"].record.phase is Phase.READY


async def test_failures_are_counted_in_a_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment does not wait for how often an earlier one of its name failed."""
    counts: list[int] = []
    looks: list[float] = []
    observe, inventory = world.cluster.observe, world.cluster.inventory

    def pause_s(failures: int, limits: RetryLimits, key: str) -> float:
        counts.append(failures)
        return 0.001

    async def observed() -> dict[str, EngineView]:
        looks.append(time.monotonic())
        return await observe()

    async def broken() -> Inventory:
        raise ConnectionResetError("no node answers")

    monkeypatch.setattr(retrying, "pause_s", pause_s)
    monkeypatch.setattr(world.cluster, "observe", observed)
    async with world.controlled():
        await world.end(world.register("base"))
        for _ in range(2):
            monkeypatch.setattr(world.cluster, "inventory", broken)
            counts.clear()
            begun = world.deploy("base")
            await world.until(lambda: len(counts) >= 3)
            assert counts[:3] == [1, 2, 3]
            cancel(world.repository, begun.id)
            assert (await world.end(begun)).phase is Phase.CANCELLED
            monkeypatch.setattr(world.cluster, "inventory", inventory)
            since = len(looks)
            await world.until(lambda n=since: len(looks) >= n + 3)  # type: ignore[misc]


async def test_a_name_that_no_text_can_hold_ends_a_registration(world: World, tmp_path: Path) -> None:
    """A file's name may be any bytes. The refusal repeated it, which no record could hold."""
    root = tmp_path / "own"
    world.settings = Settings(home=tmp_path / "home", allowed_roots=str(root), engine="echo")
    (root / "base").mkdir(parents=True)
    (root / "base" / os.fsdecode(b"\xff.json")).symlink_to("/etc/passwd")
    world.files = root
    async with world.controlled():
        failed = await world.end(world.register("base"))
    assert failed.phase is Phase.FAILED
    assert "\\udcff.json' links to a file outside" in failed.reason
