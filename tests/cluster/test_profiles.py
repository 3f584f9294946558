"""Profiles on a real cluster: measured at registration, estimated from, and resumed after a kill."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from clusters import Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

BASE = "smol"
BUSY = 5.0  # how much slower a shared machine may be by now than when it was measured, or quicker
LOAD = {"batch": 1, "inputTokens": 32, "outputTokens": 32}


def profile(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"/models/{BASE}/profile")
    return found


def estimate(cluster: Cluster, **body: Any) -> dict[str, Any]:
    reply = cluster.http.post(f"/models/{BASE}/estimate", json={**LOAD, **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def measuring(cluster: Cluster) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "workers.measuring" in line and str(cluster.home) in " ".join(line):
                found.add(process)
    return found


def test_registering_measured_the_architecture(cluster: Cluster) -> None:
    found = profile(cluster)
    print(f"\n{found['reason']}: {[(p['batch'], p['inputTokens'], p['tpotMs']) for p in found['loads']]}")
    assert (found["model"], found["phase"], found["dtype"]) == (BASE, "Ready", "float32")
    assert len(found["loads"]) == found["plannedLoads"] == 4 + 7  # of the base, with variants
    assert not measuring(cluster)


def test_another_model_of_the_shape_needs_no_measuring(cluster: Cluster, base_folder: Path) -> None:
    began = time.monotonic()
    cluster.perform("POST", "/register_model", {"model": "again", "source": str(base_folder)})
    assert time.monotonic() - began < 30
    key = profile(cluster)["key"]
    assert cluster.get("/models/again/profile")["key"] == key
    cluster.perform("DELETE", "/models/again")


def test_the_deployment_was_estimated_from_it(cluster: Cluster) -> None:
    assert "from its profile" in cluster.get(f"/deployments/{BASE}")["plan"]["reason"]


def test_an_estimate_is_near_what_a_request_takes(cluster: Cluster) -> None:
    tpot_ms = min(measured_tpot_ms(cluster) for _ in range(3))
    found = estimate(cluster)
    print(f"\nTPOT estimated {found['tpotMs']}, measured {tpot_ms:.1f} ms")
    assert found["basis"] == "profile"
    assert found["tpotMs"]["low"] / BUSY < tpot_ms < found["tpotMs"]["high"] * BUSY
    assert found["concurrency"] > 0
    wrong = cluster.http.post(f"/models/{BASE}/estimate", json={**LOAD, "tensorParallel": 2})
    assert "9 heads cannot be split 2 ways" in wrong.json()["error"]["message"]


def measured_tpot_ms(cluster: Cluster) -> float:
    """Of one request, from its stream."""
    body = {"model": BASE, "prompt": "word " * 32, "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    times = []
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json={**body, "stream": True}, timeout=120, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.monotonic())
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3


def test_a_controller_that_is_killed_leaves_a_profile_that_goes_on(cluster: Cluster) -> None:
    """No engine is left measuring, and no load is measured twice."""
    operation = cluster.submit("POST", f"/models/{BASE}/profile", {"again": True})
    until(lambda: profile(cluster)["loads"], 300, "the first load")
    first = profile(cluster)["loads"][0]
    (old,) = measuring(cluster)
    cluster.replica("ostinato", "Controller").kill()
    until(lambda: not old.is_running(), 30, "the end of the measuring engine")
    ended = cluster.finish(operation, 480)
    assert ended["phase"] == "Ready"
    found = profile(cluster)
    assert found["loads"][0] == first
    assert len(found["loads"]) == found["plannedLoads"]
    assert not measuring(cluster)
