"""The turn of a measurement: its length, its place, and what may interrupt it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane import errors
from controlplane.controller import profile_actions, stream_watchdog
from controlplane.profiling import job, progress, queue
from controlplane.profiling.job import ProfilingJob
from controlplane.profiling.keys import key_of_model
from controlplane.profiling.queue import Queued
from controlplane.settings import Settings
from controlplane.state import StateStore
from controlplane.state.records import Model, ModelProfile, NodeLedger, OperationKind, Phase, Reservation
from controlplane.state.repository import State
from placement.types import Device, HolderMemory, Inventory
from testkit import checkpoints
from testkit.controlplane.builders import operation, ready_base, state
from testkit.controlplane.world import World
from testkit.controlplane.world_measuring import measured_world, measuring, profile, waiting
from testkit.controlplane.world_reservations import cluster, reservations
from testkit.in_memory import GIB, cancel
from testkit.measured_cluster import HOST
from workers.measuring.request import MeasureRequest

pytestmark = pytest.mark.usefixtures("hurry")

GPU = replace(HOST, kind="h200", model="h200")
OTHER = ModelProfile("k", "a", "bfloat16", "h200", "0.32.0", Phase.PROFILING)


@pytest.fixture
def world(settings: Settings, store: StateStore, tmp_path: Path) -> World:
    return measured_world(settings, store, tmp_path / "files", "one", "two")


def gpus(**nodes: int) -> tuple[Device, ...]:
    return tuple(replace(GPU, node=node, index=n) for node, count in nodes.items() for n in range(count))


def key_of(model: Model, inventory: Inventory, settings: Settings) -> str:
    key = key_of_model(model, inventory, settings)
    assert key is not None
    return key.text


# --- how long a turn takes --------------------------------------------------------------------------


def crowd(
    model: Model, devices: Sequence[Device], settings: Settings, wait: int, ready: int, done: int
) -> tuple[State, list[str]]:
    """N waiting profiles, the oldest first, and M that are ready; operations that are done."""
    inventory, spec = Inventory(tuple(devices)), model.spec
    assert spec is not None
    models = [
        replace(model, name=f"m{n}", uid=n, created_at_s=float(n), spec=replace(spec, num_layers=2 + n))
        for n in range(wait + ready)
    ]
    keys = [key_of_model(one, inventory, settings) for one in models]
    texts = [key.text for key in keys if key]
    assert len(set(texts)) == wait + ready
    fresh = [progress.fresh_profile(key, 0.0) for key in keys if key]
    profiles = [one if n < wait else replace(one, phase=Phase.READY) for n, one in enumerate(fresh)]
    asked = [
        replace(operation(OperationKind.PROFILE, f"m{n}"), id=f"asked-{n}", created_at_s=float(n))
        for n in range(wait)
    ]
    past = [
        replace(
            operation(OperationKind.REGISTER, models[n % len(models)].name), id=f"past-{n}", phase=Phase.READY
        )
        for n in range(done)
    ]
    known = [replace(one, profile=text) for one, text in zip(models, texts, strict=True)]
    return state(*known, *profiles, *asked, *past), texts


def seconds_of_a_turn(now: State, key: str, devices: Sequence[Device], settings: Settings) -> float:
    began_s = time.process_time()
    queue.next_job(now, key, Inventory(tuple(devices)), settings)
    return time.process_time() - began_s


@pytest.mark.parametrize("busy", [False, True])
def test_a_turn_among_ten_thousand_gpus_takes_a_moment(files: Path, settings: Settings, busy: bool) -> None:
    """Every profile that waits asks each second. It was 15 s; it is 0.3 s on a slow core."""
    settings = settings.model_copy(update={"engine": "vllm"})
    devices = gpus(**{f"n{n}": 8 for n in range(1250)})
    now, keys = crowd(ready_base(files), devices, settings, wait=4, ready=0, done=1000)
    held = [
        NodeLedger(
            f"n{n}",
            tuple(Reservation(f"measuring:{n}-{i}", 0, 0, "h200", i, GIB, 0.0) for i in range(8)),
        )
        for n in range(1250 if busy else 0)
    ]
    now = replace(now, ledgers=state(*held).ledgers)
    assert seconds_of_a_turn(now, keys[-1], devices, settings) < 2.0


def test_a_turn_among_many_profiles_and_operations_takes_a_moment(files: Path, settings: Settings) -> None:
    """It was 30 ms and more for each of those that wait; it is 2 ms on a slow core."""
    settings = settings.model_copy(update={"engine": "vllm"})
    now, keys = crowd(ready_base(files), (HOST,), settings, wait=40, ready=260, done=1000)
    took = min(seconds_of_a_turn(now, keys[39], (HOST,), settings) for _ in range(3))
    assert took < 0.02


def test_only_profiles_with_an_older_request_go_first(files: Path, settings: Settings) -> None:
    settings = settings.model_copy(update={"engine": "vllm"})
    now, keys = crowd(ready_base(files), (HOST,), settings, wait=3, ready=1, done=0)
    inventory = Inventory((HOST,))
    assert isinstance(queue.next_job(now, keys[0], inventory, settings), ProfilingJob)
    second = queue.next_job(now, keys[1], inventory, settings)
    assert second == Queued(queue.waiting_reason(now, [keys[0]]))
    cancelled = replace(now.operations["asked-0"].record, cancel_requested=True)
    known = {**now.operations, "asked-0": replace(now.operations["asked-0"], record=cancelled)}
    now = replace(now, operations=known)
    assert isinstance(queue.next_job(now, keys[1], inventory, settings), ProfilingJob)


# --- elsewhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("busy", [1, 3])
def test_a_node_that_is_idle_is_preferred_to_what_is_left_of_one(
    tmp_path: Path, settings: Settings, count: int, busy: int
) -> None:
    """Fewer runs can be measured with fewer than all GPUs of a node."""
    heads = {"num_attention_heads": count, "num_key_value_heads": count}
    checkpoints.write_model(
        tmp_path / "m", checkpoints.config(hidden_size=64, intermediate_size=128, vocab_size=64, **heads)
    )
    model, settings = ready_base(tmp_path, "m"), settings.model_copy(update={"engine": "vllm"})
    inventory = Inventory(gpus(a=count, b=count, c=count))
    key = key_of(model, inventory, settings)
    fresh = progress.fresh_profile(key_of_model(model, inventory, settings), 0.0)  # type: ignore[arg-type]
    alone = job.profiling_job(fresh, model, inventory, settings)
    held = NodeLedger(
        alone.node, tuple(Reservation("measuring:k", 0, i, "h200", i, 4 * GIB, 0.0) for i in range(busy))
    )
    asked = operation(OperationKind.PROFILE, model.name)
    now = state(replace(model, profile=key), fresh, OTHER, held, asked)
    found = queue.next_job(now, key, inventory, settings)
    assert isinstance(found, ProfilingJob)
    assert found.node != alone.node
    assert found.request.engine_runs == alone.request.engine_runs


# --- what interrupts a measuring --------------------------------------------------------------------


async def test_a_store_that_is_away_for_a_moment_interrupts_no_measuring(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.controlled():
        registering = await measuring(world, "one")
        looks = [0]

        def away() -> State:
            looks[0] += 1
            raise errors.Unavailable("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr(world.repository, "read", away)
            patch.setattr(world.repository, "revision", lambda: -1)  # the controller has nothing to do
            await world.until(lambda: looks[0] >= 5)
        cluster(world).go.set()
        assert "loads measured in" in (await world.end(registering)).reason
    assert (len(cluster(world).orders), cluster(world).ended) == (1, 1)


async def test_a_measurement_beyond_its_limit_is_stopped_even_without_the_store(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_actions, "OVERTIME_S", 0.3)
    world.settings = world.settings.model_copy(update={"profile_seconds": 0.1})

    def away() -> State:
        raise errors.Unavailable("the store is away")

    async with world.controlled():
        await measuring(world, "one")
        with monkeypatch.context() as patch:
            patch.setattr(world.repository, "read", away)
            await world.until(lambda: cluster(world).ended)


async def test_a_measurement_that_does_not_stop_is_reported_as_too_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_actions, "OVERTIME_S", 0.1)
    monkeypatch.setattr(stream_watchdog, "ENDS_S", 0.05)
    world.settings = world.settings.model_copy(update={"profile_seconds": 0.1})
    go = asyncio.Event()

    async def deaf(order: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()
        yield ""

    monkeypatch.setattr(cluster(world), "measure", deaf)
    async with world.controlled():
        ended = await world.end(world.register("one"))
        go.set()
    assert "did not end within" in ended.reason


async def test_the_reason_names_the_running_measurement(world: World) -> None:
    """The message does not name what it had waited for."""
    async with world.controlled():
        first = await measuring(world, "one")
        await waiting(world, "two", "of 'one'")
        cluster(world).slow = True
        cluster(world).go.set()
        await world.end(first)
        cluster(world).go.clear()
        await world.until(lambda: (found := profile(world, "two")) and found.phase is Phase.PROFILING)
        begun = profile(world, "two")
    assert begun is not None
    assert "waits until" not in begun.reason


async def test_devices_that_cannot_be_looked_at_once_end_no_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.controlled():
        await measuring(world, "one")
        second = await waiting(world, "two", "of 'one'")
        real, looks = cluster(world).inventory, [0]

        async def failing_once() -> Inventory:
            looks[0] += 1
            if looks[0] == 1:
                raise TimeoutError("GCS")
            return await real()

        monkeypatch.setattr(cluster(world), "inventory", failing_once)
        await world.until(lambda: looks[0] > 1)
        cluster(world).go.set()
        assert "loads measured in" in (await world.end(second)).reason


async def test_a_model_registered_while_its_measurement_stops_is_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was cancelled, and its engine takes a moment to stop."""
    real, stopping, stopped = cluster(world).measure, asyncio.Event(), asyncio.Event()

    async def slow(order: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        try:
            async for line in real(order, node):
                yield line
        except asyncio.CancelledError:
            stopping.set()
            await stopped.wait()
            raise

    monkeypatch.setattr(cluster(world), "measure", slow)
    async with world.controlled():
        first = await measuring(world, "one")
        cancel(world.repository, first.id)
        await world.until(stopping.is_set)
        await world.end(first)
        again = world.register("one")
        await world.until(lambda: profile(world, "one"))
        cluster(world).go.set()
        stopped.set()
        assert "loads measured in" in (await world.end(again)).reason


@pytest.mark.parametrize("for_ever", [False, True])
async def test_the_second_is_not_measured_with_less_for_memory_of_the_first(
    world: World, monkeypatch: pytest.MonkeyPatch, for_ever: bool
) -> None:
    """It is seen for a few samples after the end; if it stays, the second has to do with less."""
    monkeypatch.setattr(profile_actions, "RECLAIM_WAIT_S", 0.1 if for_ever else 60.0)
    big, samples = replace(GPU, total_bytes=8 * GIB, free_bytes=8 * GIB), [3]
    cluster(world).devices = Inventory((big,))
    async with world.controlled():
        first = await measuring(world, "one")
        second = await waiting(world, "two", "of 'one'")
        (holder,) = {one.holder for one in reservations(world)}

        async def late() -> Inventory:
            running = any(who == holder for _, who in cluster(world).running)
            if not running and not for_ever:
                samples[0] -= 1
            if samples[0] < 0 or len(cluster(world).orders) > 1:
                return Inventory((big,))
            return Inventory((replace(big, free_bytes=3 * GIB, uses=(HolderMemory(holder, 5 * GIB),)),))

        monkeypatch.setattr(cluster(world), "inventory", late)
        cluster(world).go.set()
        for one in (first, second):
            assert (await world.end(one)).phase is Phase.READY
    a, b = cluster(world).orders
    assert (b.device_bytes < a.device_bytes) == for_ever


async def test_a_waiting_profile_is_decided_again_only_after_a_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.controlled():
        first = await measuring(world, "one")
        second = await waiting(world, "two", "of 'one'")
        real, turns, looks = queue.next_job, [0], [0]
        sample = cluster(world).inventory

        def counted(*args: Any) -> ProfilingJob | Queued:
            turns[0] += 1
            return real(*args)

        async def looked() -> Inventory:
            looks[0] += 1
            return await sample()

        monkeypatch.setattr(queue, "next_job", counted)
        monkeypatch.setattr(cluster(world), "inventory", looked)
        await world.until(lambda: looks[0] >= 20)
        assert turns[0] <= 3  # its report was a change
        cluster(world).go.set()
        for one in (first, second):
            assert "loads measured in" in (await world.end(one)).reason
