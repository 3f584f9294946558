"""A measurement holds its memory in the ledger, from its beginning to its end, whatever ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from controlplane import errors
from controlplane.cluster import reservations as ledger
from controlplane.cluster.memory_usage import memory_by_node
from controlplane.controller import profile_actions
from controlplane.controller.controller import Controller
from controlplane.controller.metrics import ControllerMetrics
from controlplane.planning.reconcile import Observed, Release, reconcile
from controlplane.profiling import job, progress, queue
from controlplane.profiling.job import ProfilingJob
from controlplane.profiling.keys import key_of_model, served_spec
from controlplane.profiling.queue import Queued
from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.records import ModelProfile, NodeLedger, OperationKind, Phase, Reservation
from controlplane.state.repository import Change, Put, Repository
from placement.types import Device, DeviceKey, HolderMemory, Inventory, RankPlacement, key_of
from profiler.profiling_plan import Reach, needed_bytes
from testkit import checkpoints
from testkit.controlplane.builders import PLACED, operation, ready_base, state
from testkit.controlplane.ledger_steps import after
from testkit.controlplane.world import World
from testkit.controlplane.world_reservations import Checked, cluster, reservations
from testkit.in_memory import GIB, cancel
from testkit.measured_cluster import HOST, MeasuredCluster, lines_of

pytestmark = pytest.mark.usefixtures("hurry")


@pytest.fixture
def world(settings: Settings, store: StateStore, files: Path) -> World:
    """In every commit, a profile that is Profiling has its memory reserved, and no other profile has."""
    made = World(settings.model_copy(update={"engine": "vllm"}), Checked(store), files)
    made.cluster = MeasuredCluster()
    return made


async def test_memory_is_reserved_while_a_profile_is_measured(world: World) -> None:
    cluster(world).go.clear()
    async with world.controlled():
        registering = world.register("base")
        await world.until(lambda: cluster(world).running)
        (held,), (order,) = reservations(world), cluster(world).orders
        (profile,) = world.repository.read().profiles.values()
        assert (held.holder, held.kind, held.index) == (f"measuring:{profile.record.key}", "cpu", 0)
        assert list(world.repository.read().ledgers) == [HOST.node]
        assert order.holder == held.holder
        spec = world.repository.read().models["base"].record.spec
        assert spec is not None
        reach = Reach(True, 1, order.device_bytes, 64, 16, 2048)
        served = served_spec(spec, "float32")
        needed = max(needed_bytes(served, run, reach) for run in order.engine_runs)
        assert held.memory_bytes == int(1.25 * needed) < order.device_bytes
        cluster(world).go.set()
        assert (await world.end(registering)).phase is Phase.READY
        assert reservations(world) == []


@pytest.mark.parametrize("first", ["place", "measure"])
@pytest.mark.parametrize("known", [False, True])
def test_a_placement_and_a_measurement_from_one_snapshot_do_not_both_commit(
    repository: Repository, first: str, known: bool
) -> None:
    """Whether there was anything on the node before or not."""
    rank = RankPlacement(0, 0, 0, "n", 0, "cpu", 0, 1, 1)
    if known:
        there = replace(PLACED, ranks=(replace(rank, device_index=1),))
        repository.commit(ledger.reserve(repository.read(), "there", 1, there, 0.0))
    seen = repository.read()
    asked = {
        "place": ledger.reserve(seen, "m", 1, replace(PLACED, ranks=(rank,)), 0.0),
        "measure": ledger.reserve_to_measure(seen, "k", 0, [DeviceKey("n", "cpu", 0)], 1, 0.0),
    }
    repository.commit(asked.pop(first))
    (second,) = asked.values()
    with pytest.raises(errors.StaleWrite):
        repository.commit(second)


@pytest.mark.parametrize("failure", [errors.ProfilingFailed("it ended with SIGKILL"), OSError("disk full")])
async def test_a_reservation_is_released_when_its_measurement_fails(world: World, failure: Exception) -> None:
    cluster(world).fails_after, cluster(world).failure = 1, failure
    async with world.controlled():
        assert (await world.end(world.register("base"))).phase is Phase.READY
        assert reservations(world) == []
    assert len(cluster(world).orders) == 1


async def test_a_reservation_is_released_when_no_job_waits_for_it(world: World) -> None:
    """Though no line comes on which that could be noticed."""
    cluster(world).go.clear()
    async with world.controlled():
        registering = world.register("base")
        await world.until(lambda: cluster(world).running)
        cancel(world.repository, registering.id)
        await world.until(lambda: not reservations(world))
        assert not cluster(world).running


async def test_a_hanging_measurement_is_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_actions, "OVERTIME_S", 0.1)
    world.settings = world.settings.model_copy(update={"profile_seconds": 0.1})
    cluster(world).go.clear()
    async with world.controlled():
        ended = await world.end(world.register("base"))
    assert ended.phase is Phase.READY
    assert "did not end within" in ended.reason
    assert reservations(world) == []
    assert cluster(world).running == []


async def test_a_killed_controller_s_successor_continues_the_measurement(world: World) -> None:
    cluster(world).go.clear()
    registering = world.register("base")
    async with world.controlled():
        await world.until(lambda: cluster(world).running)
    (held,) = reservations(world)
    cluster(world).go.set()
    async with world.controlled():
        assert (await world.end(registering)).phase is Phase.READY
    assert [order.holder for order in cluster(world).orders] == [held.holder] * 2
    assert reservations(world) == []


async def test_a_measurement_s_memory_is_shown_as_its_own(world: World) -> None:
    cluster(world).go.clear()
    cluster(world).takes_bytes = GIB
    registry = CollectorRegistry()
    async with world.controlled():
        world.register("base")
        await world.until(lambda: cluster(world).running)
        (held,) = reservations(world)
        (device,) = (await cluster(world).inventory()).devices
        nodes = [replace(node, devices=(device,)) for node in await cluster(world).nodes()]
        (shown,) = memory_by_node(nodes, world.repository.read().ledgers, 0.0)[0].devices
        assert shown.usage.ours == {held.holder: held.memory_bytes}
        assert (shown.usage.others, shown.reserved_bytes) == (0, held.memory_bytes)
        assert shown.usage.free == HOST.total_bytes - held.memory_bytes
        await Controller(world.settings, world.repository, world.cluster, ControllerMetrics(registry)).step()
    labels = {"node": HOST.node, "device": "cpu:0", "state": "reserved"}
    assert registry.get_sample_value("ostinato_device_memory_bytes", labels) == held.memory_bytes


def test_on_gpus_all_that_vllm_fills_is_held_of_each_that_is_still_used(
    files: Path, settings: Settings
) -> None:
    model = ready_base(files)
    gpus = Inventory(tuple(replace(HOST, kind="h200", model="h200", index=n) for n in range(4)))
    settings = settings.model_copy(update={"engine": "vllm"})
    key = key_of_model(model, gpus, settings)
    assert key is not None
    profile = progress.fresh_profile(key, 0.0)
    whole = job.profiling_job(profile, model, gpus, settings)
    worlds = [run.setting.world_size for run in whole.request.engine_runs]
    assert 1 < max(worlds) == len(whole.held)
    assert {at[2] for at in whole.held} == set(whole.request.devices[: max(worlds)])
    assert whole.held_bytes == whole.request.device_bytes
    alone = replace(
        whole.request, engine_runs=tuple(t for t in whole.request.engine_runs if t.setting.world_size > 1)
    )
    rest = job.profiling_job(replace(profile, measurements=tuple(lines_of(alone))), model, gpus, settings)
    assert len(rest.held) == 1
    known = tuple(lines_of(whole.request))
    assert job.profiling_job(replace(profile, measurements=known), model, gpus, settings).held == ()


PROFILE = ModelProfile("k", "a", "float32", "a CPU", "0.32.0", Phase.PROFILING, rounds=2)
HELD = Reservation("measuring:k", 2, 0, "cpu", 0, 1, 0.0)


@pytest.mark.parametrize(
    ("profile", "orphaned"),
    [
        (PROFILE, False),
        (replace(PROFILE, rounds=3), True),
        (replace(PROFILE, phase=Phase.PENDING), True),
        (replace(PROFILE, phase=Phase.READY), True),
        (replace(PROFILE, key="another"), True),
    ],
)
def test_orphans_are_released(profile: ModelProfile, orphaned: bool) -> None:
    found = state(profile, NodeLedger("n", (HELD,)))
    actions = reconcile(found, Observed({}, frozenset(), 0.0))
    assert (Release("measuring:k") in actions) == orphaned
    left = after(found, list(ledger.without_orphans(found, "measuring:k")))
    assert bool(left.ledgers) != orphaned
    assert ledger.orphans(left) == []


# --- any sequence of decisions ----------------------------------------------------------------------

KINDS = ("small", "wide", "deep")
GPU = replace(HOST, node="gpu", kind="h200", model="h200", total_bytes=6 * GIB, free_bytes=6 * GIB)
CLUSTERS = (
    (HOST, replace(HOST, node="other", total_bytes=5 * GIB, free_bytes=5 * GIB)),
    (GPU, replace(GPU, index=1), replace(GPU, node="gpus", total_bytes=12 * GIB, free_bytes=12 * GIB)),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("measure"), st.sampled_from(KINDS)),
        st.tuples(st.just("settle"), st.sampled_from(KINDS)),
        st.tuples(st.just("place"), st.integers(0, 2), st.sampled_from([20, 60, 100]), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 2)),
    ),
    min_size=4,
    max_size=14,
)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    for number, name in enumerate(KINDS):
        changes = {"num_hidden_layers": 2 + number, "vocab_size": 64 << (7 * number)}
        checkpoints.write_model(root / name, checkpoints.config(**changes))
    return root


class Simulated:
    """Devices, and a process for each holder that takes a share of what it was promised."""

    def __init__(self, shapes: Path, devices: tuple[Device, ...], shares: Sequence[float]) -> None:
        self.devices, self.shares = devices, shares
        self.settings = Settings(home=shapes, engine="vllm", max_model_len=64)
        models = [replace(ready_base(shapes, name), name=name, phase=Phase.READY) for name in KINDS]
        keys = [key_of_model(model, Inventory(devices), self.settings) for model in models]
        self.keys = {name: key.text for name, key in zip(KINDS, keys, strict=True) if key}
        assert len(set(self.keys.values())) == len(KINDS)
        profiles = [progress.fresh_profile(key, 0.0) for key in keys if key]
        operations = [
            replace(operation(OperationKind.PROFILE, name), id=name, created_at_s=float(n))
            for n, name in enumerate(KINDS)
        ]
        known = [replace(m, profile=self.keys[m.name]) for m in models]
        self.state = state(*known, *profiles, *operations)

    def inventory(self) -> Inventory:
        promises = ledger.promised(self.state.ledgers)
        found = []
        for device in self.devices:
            holders = sorted(promises.get(key_of(device), {}).items())
            uses = tuple(
                HolderMemory(holder, int(count * self.shares[n % len(self.shares)]))
                for n, (holder, count) in enumerate(holders)
            )
            used = sum(use.memory_bytes for use in uses)
            found.append(replace(device, free_bytes=device.total_bytes - used, uses=uses))
        return Inventory(tuple(found))

    def commit(self, changes: Sequence[Change]) -> None:
        profiles = dict(self.state.profiles)
        for change in changes:
            if isinstance(change, Put) and isinstance(change.record, ModelProfile):
                profiles[change.record.key] = replace(profiles[change.record.key], record=change.record)
        ledgers = [c for c in changes if not (isinstance(c, Put) and isinstance(c.record, ModelProfile))]
        self.state = replace(after(self.state, ledgers), profiles=profiles)

    def measure(self, name: str) -> None:
        profile = self.state.profiles[self.keys[name]].record
        if profile.phase is Phase.PROFILING:
            return
        try:
            found = queue.next_job(self.state, profile.key, self.inventory(), self.settings)
        except errors.ProfilingFailed:
            return
        if isinstance(found, Queued):
            # it waits for another profile
            assert ledger.being_measured(self.state.ledgers) or name != KINDS[0]
        else:
            self.begin(profile, found)

    def begin(self, profile: ModelProfile, found: ProfilingJob) -> None:
        begun = Put(progress.attempted(profile, found, 0.0), 1)
        held = ledger.reserve_to_measure(self.state, profile.key, 0, found.held, found.held_bytes, 0.0)
        self.commit([begun, *held])

    def settle(self, name: str) -> None:
        profile = self.state.profiles[self.keys[name]].record
        released = ledger.release(self.state, ledger.measuring(profile.key))
        self.commit([Put(replace(profile, phase=Phase.PENDING), 1), *released])

    def end(self, name: str) -> None:
        self.settle(name)
        key = self.keys[name]
        self.commit([Put(replace(self.state.profiles[key].record, phase=Phase.READY), 1)])

    def remove(self, index: int) -> None:
        self.commit(ledger.release(self.state, f"m{index}"))

    def place(self, index: int, percent: int, displaces: bool) -> None:
        """A stand-in for the solver, which sees only free memory. A deployment that displaces takes measured
        devices too."""
        device = self.devices[index % len(self.devices)]
        sight = ledger.available(
            self.inventory(), self.state.ledgers, 0.03, exclude=f"m{index}", measured=not displaces
        )
        (free,) = (d.free_bytes for d in sight.devices if key_of(d) == key_of(device))
        rank = RankPlacement(
            0, 0, 0, device.node, device.index, device.kind, 0, 1, max(1, free * percent // 100)
        )
        if free > 0:
            measured = ledger.being_measured(self.state.ledgers).get(key_of(device))
            gone = [measured] if measured and displaces else []
            placed = replace(PLACED, ranks=(rank,))
            holders = [ledger.measuring(key) for key in gone]
            changes = ledger.reserve(self.state, f"m{index}", 1, placed, 0.0, preempting=holders)
            stopped = [Put(progress.preempted(self.state.profiles[k].record, "m", 0.0), 1) for k in gone]
            self.commit([*stopped, *changes])

    def check(self) -> None:
        promises = ledger.promised(self.state.ledgers)
        for device in self.devices:
            holders = promises.get(key_of(device), {})
            assert sum(holders.values()) <= device.total_bytes * 0.97 + 1
            assert sum(ledger.is_measuring(holder) for holder in holders) <= 1
        measured = set(ledger.being_measured(self.state.ledgers).values())
        begun = {k for k, found in self.state.profiles.items() if found.record.phase is Phase.PROFILING}
        assert measured == begun
        assert not any(map(ledger.is_measuring, ledger.orphans(self.state)))


@given(
    devices=st.sampled_from(CLUSTERS),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    steps=STEPS,
)
def test_devices_are_never_promised_twice(
    shapes: Path, devices: tuple[Device, ...], shares: list[float], steps: list[tuple[Any, ...]]
) -> None:
    """Two profiles are never measured on one device, however much of their promises processes take."""
    simulated = Simulated(shapes, devices, shares)
    for what, *arguments in steps:
        getattr(simulated, what)(*arguments)
        simulated.check()


def test_all_are_measured_when_each_ends(shapes: Path) -> None:
    """No profile waits for ever: the oldest waiting profile is never passed."""
    simulated, order = Simulated(shapes, CLUSTERS[0][:1], (0.5,)), []
    for _ in KINDS:
        for name in reversed(KINDS):
            if name not in order:
                simulated.measure(name)
        (key,) = ledger.being_measured(simulated.state.ledgers).values()
        (begun,) = (name for name, one in simulated.keys.items() if one == key)
        order.append(begun)
        simulated.end(begun)
    assert order == list(KINDS)
