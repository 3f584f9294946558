"""Engines that answer at once while the request path is measured, and what ends it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane import errors
from controlplane.runtime import ray_cluster, serve
from controlplane.runtime.path_probe import answering_at_once
from controlplane.runtime.ray_cluster import RayCluster
from controlplane.settings import Settings
from testkit.engine_configs import echo_config
from testkit.in_memory import ScriptedWorker
from workers.server.worker import Worker


class Groups:
    """Two groups, the first of two replicas; those in `gone` do not answer. `log` has their messages,
    `answered` the markers that all replicas of a group have taken."""

    def __init__(self) -> None:
        self.workers: dict[str, list[Worker]] = {}
        self.gone: set[str] = set()
        self.log: list[str] = []
        self.answered: list[str] = []

    async def start(self) -> Groups:
        self.workers = {"b": [await started(), await started()], "b@1": [await started()]}
        return self

    async def tell(self, group_id: str, marker: str) -> list[str]:
        self.log.append(f"{group_id}: {marker}")
        await asyncio.sleep(0)
        if group_id in self.gone:
            raise errors.Unavailable(f"the engine of '{group_id}' is not available")
        before = [await worker.answer_at_once(marker) for worker in self.workers[group_id]]
        self.answered.append(f"{group_id}: {marker}")
        return before

    async def markers(self) -> set[str]:
        """The requests of replicas, which are then removed."""
        return {await w.answer_at_once("") for workers in self.workers.values() for w in workers}


async def started() -> Worker:
    worker = ScriptedWorker(echo_config(), "127.0.0.1")
    await worker.start()
    return worker


IDS = ("b", "b@1")


async def test_every_replica_has_the_marker_within_and_none_after() -> None:
    groups = await Groups().start()
    async with answering_at_once(IDS, "m", groups.tell):
        assert await groups.markers() == {"m"}
        for group_id in IDS:
            await groups.tell(group_id, "m")
    assert await groups.markers() == {""}


@pytest.mark.parametrize("change", ["restarted", "came", "went", "does not answer"])
async def test_a_probe_fails_if_replicas_come_or_go_meanwhile(change: str) -> None:
    groups = await Groups().start()
    with pytest.raises(errors.OstinatoError):  # noqa: PT012
        async with answering_at_once(IDS, "m", groups.tell):
            if change == "restarted":
                groups.workers["b"][1] = await started()
            elif change == "came":
                groups.workers["b"].append(await started())
            elif change == "went":
                groups.workers["b"].pop()
            else:
                groups.gone.add("b")
    groups.workers.pop("b") if change == "does not answer" else None
    assert await groups.markers() == {""}


async def test_every_engine_forgets_the_probe_in_any_case() -> None:
    groups = await Groups().start()
    groups.gone.add("b@1")
    with pytest.raises(errors.Unavailable):
        async with answering_at_once(IDS, "m", groups.tell):
            raise AssertionError("not every group was told")
    groups.gone.clear()
    assert await groups.markers() == {""}

    entered = asyncio.Event()

    async def cut_off() -> None:
        async with answering_at_once(IDS, "m", groups.tell):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(cut_off())
    await entered.wait()
    groups.answered.clear()
    for _ in range(2):  # the second one while they get the marker
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(30):
        while sorted(groups.answered) != ["b: ", "b@1: "]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert await groups.markers() == {""}


async def test_a_probe_that_is_cut_off_is_killed_before_the_engines_forget_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would continue, and real engines would generate for it."""
    log: list[str] = []
    ended, running = asyncio.Event(), asyncio.Event()

    class Task:
        def __await__(self) -> Any:
            async def wait() -> None:
                running.set()
                await ended.wait()
                log.append("gone")
                raise RuntimeError("killed")

            return wait().__await__()

    def cancel(task: Task, force: bool) -> None:
        assert force
        log.append("killed")
        asyncio.get_running_loop().call_later(0.01, ended.set)

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda asked: Task()))
    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(remote=lambda call: remote, cancel=cancel))
    monkeypatch.setattr(ray_cluster, "ray_serve", SimpleNamespace(status=lambda: SimpleNamespace(proxies={})))
    markers = {"b": ""}

    async def ask(group_id: str, method: str, marker: str, timeout_s: float) -> list[str]:
        assert method == "answer_at_once"
        log.append("told" if marker else "forgets")
        before, markers[group_id] = markers[group_id], marker
        return [before]

    async def ask_own(component: str, method: str, timeout_s: float, marker: str) -> list[None]:
        assert (component, method) == ("Gateway", "leave_out")
        log.append("left out" if marker else "counted")
        return [None]

    monkeypatch.setattr(serve, "ask_replicas", ask)
    monkeypatch.setattr(serve, "ask_own", ask_own)
    probing = asyncio.create_task(RayCluster(settings).probe_path("b", ["b"], 64))
    await running.wait()
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    assert log == ["left out", "told", "killed", "gone", "forgets", "counted"]
