"""Counts of requests under way that are too old to decide by."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controlplane.runtime import ray_cluster, serve
from controlplane.runtime.ray_cluster import RayCluster
from controlplane.settings import Settings


async def test_a_count_is_forgotten_when_the_next_one_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [{"b": 3.0}]
    hung = asyncio.Event()

    async def ask_own(component: str, method: str, timeout_s: float) -> list[dict[str, float]]:
        if not answers:
            hung.set()
            await asyncio.Event().wait()  # a gateway that hangs
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return [dict(answer)]

    monkeypatch.setattr(serve, "ask_own", ask_own)
    monkeypatch.setattr(ray_cluster, "COUNT_EVERY_S", 0.01)
    monkeypatch.setattr(ray_cluster, "COUNT_FRESH_S", 600.0)
    runtime = RayCluster(Settings(home=tmp_path))
    assert runtime.demand() is None
    counting = asyncio.create_task(runtime.keep_counting())
    try:
        await hung.wait()
        assert runtime.demand() == {"b": 3.0}
        monkeypatch.setattr(ray_cluster, "COUNT_FRESH_S", 0.0)
        await asyncio.sleep(0.01)
        assert runtime.demand() is None
    finally:
        counting.cancel()
