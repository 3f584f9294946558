"""When the request path is measured, what is kept of it, and who goes by it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.controller import controller
from controlplane.management.commands import change_replicas, profile_model
from controlplane.management.schemas.deploy import ReplicasChange
from controlplane.planning import estimates, path_measuring
from controlplane.planning.estimates import Load, Shape
from controlplane.planning.reconcile import Action, MeasurePath, Observed, reconcile
from controlplane.planning.retrying import RetryLimits
from controlplane.profiling import request_paths
from controlplane.settings import Settings
from controlplane.state.records import Deployment, ModelProfile, PathProfile, Phase
from controlplane.state.repository import Repository, State
from controlplane.state.transactions import edit
from controlplane.state.worker_groups import GroupPhase, WorkerGroup
from profiler.request_path import ASSUMED, Burst, RequestPath
from testkit.controlplane.builders import PLACED, deployment, state
from testkit.controlplane.world import World
from testkit.in_memory import CPU, submit
from testkit.measured_cluster import MeasuredCluster

RUNNING = EngineView(EngineStatus.RUNNING)
SERVING = replace(deployment("b", Phase.DEPLOYED), established=True)
OTHER = replace(deployment("a", Phase.DEPLOYED), established=True)
PATH = RequestPath(12e-3, 1e-3, 1e-6, 0.8, 1.3)
PROFILING = ModelProfile("k", "a", "d", "d", "v", Phase.PROFILING)
STARTING = replace(OTHER, groups=(WorkerGroup(0, GroupPhase.STARTING, OTHER.groups[0].placement),))


def due(
    *records: object,
    key: str = "key",
    busy: frozenset[str] = frozenset(),
    now_s: float = 0.0,
    quiet: bool = True,
) -> list[str]:
    engines = dict.fromkeys(("a", "b"), RUNNING)
    actions = reconcile(state(*records), Observed(engines, busy, now_s, path_key=key, quiet=quiet))
    return [action.target for action in actions if isinstance(action, MeasurePath)]


def test_the_path_is_measured_once_through_a_serving_engine() -> None:
    assert due(SERVING, OTHER) == ["a"]
    assert due(SERVING, OTHER, busy=frozenset({"MeasurePath:b"})) == []
    assert due(deployment("b", Phase.DEPLOYING)) == []
    assert due(SERVING, key="") == []
    assert due(SERVING, PathProfile("key", PATH)) == []
    assert due(SERVING, PathProfile("another", PATH)) == ["b"]


def test_a_path_measurement_waits_for_work_that_would_distort_it() -> None:
    assert due(SERVING, PROFILING) == []
    assert due(SERVING, STARTING) == []
    assert due(SERVING, replace(PROFILING, phase=Phase.READY)) == ["b"]


def test_requests_are_waited_for_but_not_for_ever() -> None:
    (group,) = SERVING.groups
    serving = replace(SERVING, groups=(replace(group, since_s=1000.0),))
    assert due(serving, now_s=1100.0) == ["b"]
    assert due(serving, now_s=1100.0, quiet=False) == []
    assert due(serving, now_s=1000.0 + path_measuring.QUIET_WAIT_S + 1, quiet=False) == ["b"]


def test_a_path_measurement_is_retried_after_growing_pauses_for_ever() -> None:
    tried, now_s, pauses = PathProfile("key"), 100.0, []
    for _ in range(40):
        assert due(SERVING, tried, now_s=now_s) == ["b"]
        tried = path_measuring.failed("key", tried, "a reason", now_s)
        pauses.append(tried.failed.retry_at_s - now_s)
        assert due(SERVING, tried, now_s=now_s + pauses[-1] - 1) == []
        now_s += pauses[-1]
    whole = [min(1800, 10 * 2**n) for n in range(40)]  # each is up to a quarter shorter, by its key
    assert all(0.75 * most < pause <= most for pause, most in zip(pauses, whole, strict=True))
    assert len(set(pauses)) > 30
    settings, devices = Settings(engine="vllm"), [CPU]
    known = state(replace(tried, key=request_paths.path_key(settings, devices)))
    assert "could not be measured (a reason)" in request_paths.note(known, settings, devices)


def test_another_base_is_tried_after_a_failure() -> None:
    tried, bases = PathProfile("key"), []
    for _ in range(3):
        bases += due(SERVING, OTHER, tried, now_s=1e9)
        tried = path_measuring.failed("key", tried, "a reason", 0.0)
    assert bases == ["a", "b", "a"]


def test_prompts_fit_every_engine_of_the_base() -> None:
    """The context of engines is the model's where that is less than the settings'."""
    placed = [replace(PLACED, plan=replace(PLACED.plan, max_model_len=length)) for length in (2048, 512, 64)]
    phases = (GroupPhase.SERVING, GroupPhase.SERVING, GroupPhase.DRAINING)
    groups = tuple(WorkerGroup(n, p, placed[n]) for n, p in enumerate(phases))
    assert path_measuring.longest_prompt(replace(SERVING, groups=groups)) == 256


def test_the_path_s_key_contains_what_the_path_depends_on() -> None:
    settings = Settings(engine="vllm")
    more = Settings(engine="vllm", gateway_replicas=2)
    keys = {request_paths.path_key(s, [replace(CPU, engine="0.32.0")]) for s in (settings, more)}
    keys.add(request_paths.path_key(settings, [replace(CPU, engine="0.26.0")]))
    assert len(keys) == 3
    mixed = [replace(CPU, engine=version) for version in ("0.9.2", "0.10.1", "0.10.0+cpu", "")]
    assert request_paths.path_key(settings, mixed) == request_paths.path_key(settings, mixed[1:2])
    assert request_paths.path_key(settings, []) == ""
    assert request_paths.note(state(), settings, []) == request_paths.NOT_YET
    assert request_paths.path_key(Settings(engine="vllm", profile_seconds=0), [CPU]) == ""
    assert request_paths.path_key(Settings(engine="echo"), [CPU]) == ""
    for left_out in (Settings(engine="vllm", profile_seconds=0), Settings(engine="echo")):
        assert "is not measured here" in request_paths.note(state(), left_out, [CPU])


@pytest.mark.usefixtures("hurry")
async def test_a_group_that_begins_to_serve_meanwhile_fails_the_measurement(
    repository: Repository, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine's core has answered, which would be taken for the path."""
    monkeypatch.setattr(path_measuring, "PAUSES", RetryLimits(first_pause_s=0.01))
    settings = Settings(home=tmp_path / "home", allowed_roots=str(files), engine="vllm", max_model_len=64)
    world = World(settings, repository, files)
    world.cluster = cluster = Prober(failures=0)

    def serving() -> int:
        found = repository.read().deployments.get("base")
        return len(found.record.serving_ids()) if found else 0

    async def scale() -> None:
        edit(repository, Deployment, "base", lambda d: change_replicas(d, ReplicasChange(min=2, max=2)))
        await world.until(lambda: serving() == 2)

    cluster.scaled = scale
    async with world.controlled():
        await world.end(world.register("base"))
        assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
        await world.until(lambda: repository.read().paths)
        (kept,) = (found.record for found in repository.read().paths.values())
        assert kept.path is None
        assert "started or stopped" in kept.failed.reason
        await world.until(
            lambda: request_paths.known_path(repository.read(), settings, cluster.devices.devices)
        )
    assert [groups for _, groups in cluster.probed] == [("base",), ("base", "base@1")]


class Stale(MeasuredCluster):
    """The cluster has a second node with old reports."""

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        silent = replace(CPU, node="silent", engine="99.0")
        return (*await super().nodes(wait), NodeState("silent", (silent,), 60.0, "stale report"))


class Prober(MeasuredCluster):
    """A cluster whose first probes fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.scaled: Callable[[], Awaitable[None]] | None = None
        self.probed: list[tuple[str, tuple[str, ...]]] = []
        self.max_tokens: set[int] = set()

    async def probe_path(self, base: str, group_ids: Sequence[str], max_tokens: int) -> list[Burst]:
        self.probed.append((base, tuple(group_ids)))
        self.max_tokens.add(max_tokens)
        if (change := self.scaled) is not None:
            self.scaled = None
            await change()
        if self.failures:
            self.failures -= 1
            raise errors.Unavailable("the proxy does not answer")
        return await super().probe_path(base, group_ids, max_tokens)


@pytest.mark.usefixtures("hurry")
async def test_a_node_that_may_not_be_placed_on_is_not_in_its_key(
    repository: Repository, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its devices were reported with another engine's version before."""
    looked_for: set[str] = set()

    def noted(now: State, observed: Observed) -> tuple[Action, ...]:
        looked_for.add(observed.path_key)
        return reconcile(now, observed)

    monkeypatch.setattr(controller, "reconcile", noted)
    settings = Settings(home=tmp_path / "home", allowed_roots=str(files), engine="vllm", max_model_len=64)
    world = World(settings, repository, files)
    world.cluster = cluster = Stale()
    async with world.controlled():
        await world.end(world.register("base"))
        assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
        await world.until(lambda: repository.read().paths)
    assert looked_for == set(repository.read().paths)
    assert request_paths.known_path(repository.read(), settings, cluster.devices.devices)


@pytest.mark.usefixtures("hurry")
async def test_a_measured_path_survives_a_failure_and_is_part_of_estimates_and_placements(
    repository: Repository, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_measuring, "PAUSES", RetryLimits(first_pause_s=0.01))
    settings = Settings(
        home=tmp_path / "home", allowed_roots=str(files), engine="vllm", max_model_len=64, concurrency=4
    )
    world = World(settings, repository, files)
    world.cluster = cluster = Prober(failures=1)
    load, devices = Load(1, 16, 8), cluster.devices.devices

    def estimate() -> estimates.Answer:
        return estimates.answer(repository.read(), cluster.devices, settings, "base", Shape(), load)

    def known() -> RequestPath | None:
        return request_paths.known_path(repository.read(), settings, devices)

    async with world.controlled():
        await world.end(world.register("base"))
        before = estimate().prediction
        assert before.path_s is not None
        assert before.engine_ttft_s is not None
        assert before.path_s.value == pytest.approx(ASSUMED.mean_s(1, 16))
        assert before.ttft_s.value == pytest.approx(before.engine_ttft_s.value + before.path_s.value)
        assert any("measured once an engine serves" in note for note in before.notes)
        assert (await world.end(world.deploy("base"))).phase is Phase.DEPLOYED
        await world.until(known)
        assert cluster.probed == [("base", ("base",))] * 2
        assert cluster.max_tokens == {cluster.engines["base"].config.max_model_len // 2}
        after = estimate().prediction
        assert not any("the request path" in note for note in after.notes)
        assert after.engine_ttft_s == before.engine_ttft_s
        assert after.path_s is not None
        # The in-memory cluster's proxy: 5 ms alone, and a microsecond for each token.
        assert after.path_s.value == pytest.approx(5e-3 + 16e-6, rel=0.02)
        alone_s = before.engine_ttft_s.value
        assert after.ttft_s.value == pytest.approx(alone_s + after.path_s.value)

        await world.end(world.undeploy("base"))
        # A limit that the engine alone would keep, and its clients would see broken.
        expected = {"load": {"inputTokens": 16, "outputTokens": 8}}
        tight, wide = ({"ttft_ms": 1e3 * alone_s + more} for more in (3, 8))
        refused = await world.end(world.deploy("base", SLOs=tight, **expected))
        assert refused.phase is Phase.FAILED
        assert refused.error is not None
        assert refused.error["error"]["code"] == "no_feasible_plan"
        kept = await world.end(world.deploy("base", SLOs=wide, **expected))
        assert kept.phase is Phase.DEPLOYED
        assert len(cluster.probed) == 2

        await world.end(submit(repository, profile_model, "base", True))
        await world.until(lambda: len(cluster.probed) == 3 and known())
