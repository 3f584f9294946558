"""A base's groups as the gateway's cluster object asks them: all that serve, whichever fails."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane import errors
from controlplane.runtime import ray_cluster, serve
from controlplane.runtime.ray_cluster import RayCluster
from controlplane.settings import Settings
from workers.messages import EngineResidency, VariantRef, WorkerReport

GROUPS = {"b": ("b", "b@2"), "asleep": ()}
SEEN = EngineResidency(4, 4, 0, 0, 0, ())


@pytest.fixture
def runtime(settings: Settings) -> RayCluster:
    return RayCluster(settings, groups_of=lambda base: GROUPS[base])


def report(group: str) -> WorkerReport:
    return WorkerReport(1, "n", (), "test", group=group)


async def test_workers_are_those_of_all_groups_that_answer(
    runtime: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: set[str] = set()

    async def find(group: str) -> list[WorkerReport]:
        if group in broken:
            raise errors.Unavailable(group)
        return [report(group)]

    monkeypatch.setattr(ray_cluster, "_group_workers", find)
    assert [r.group for r in await runtime.find_workers("b")] == ["b", "b@2"]
    assert await runtime.find_workers("asleep") == []
    broken.add("b")
    assert [r.group for r in await runtime.find_workers("b")] == ["b@2"]
    broken.add("b@2")
    with pytest.raises(errors.Unavailable):
        await runtime.find_workers("b")


async def test_a_question_to_a_base_goes_to_all_its_groups(
    runtime: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    async def note(group: str, method: str, *args: Any, timeout_s: float) -> list[EngineResidency]:
        asked.append((group, method, *args))
        return [SEEN]

    variant = VariantRef("v", 7, "/a")
    monkeypatch.setattr(serve, "ask_replicas", note)
    assert await runtime.residency("b") == [SEEN, SEEN]
    await runtime.limit_variants("b", 2)
    await runtime.prefetch("b", variant)
    each = [("residency",), ("limit_variants", 2), ("prefetch", variant)]
    assert asked == [(group, *args) for args in each for group in GROUPS["b"]]
    with pytest.raises(errors.Unavailable) as refusal:
        await runtime.residency("asleep")
    assert refusal.value.retry_after_s
