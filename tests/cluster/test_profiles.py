"""Profiles on a real cluster: measured at registration, estimated from, and resumed after a kill."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from clusters import Cluster, until
from safetensors import safe_open
from safetensors.torch import save_file

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
    """A program that one of them starts has its command line for a moment, and is not another."""
    found: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "workers.measuring" in line and str(cluster.home) in " ".join(line):
                found[process] = process.ppid()
    pids = {process.pid for process in found}
    return {process for process, parent in found.items() if parent not in pids}


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
    found = estimate(cluster)
    assert found["basis"] == "profile"
    low, high = found["tpotMs"]["low"] / BUSY, found["tpotMs"]["high"] * BUSY

    def near() -> float:
        tpot_ms = measured_tpot_ms(cluster)
        print(f"\nTPOT estimated {found['tpotMs']}, measured {tpot_ms:.1f} ms")
        assert low < tpot_ms < high
        return tpot_ms

    until(near, 600, "a request that takes about what was estimated")  # others may use the cores meanwhile
    assert found["concurrency"] > 0
    wrong = cluster.http.post(f"/models/{BASE}/estimate", json={**LOAD, "tensorParallel": 2})
    assert "9 heads cannot be split 2 ways" in wrong.json()["error"]["message"]


@pytest.fixture
def shallow(base_folder: Path, adapters: dict[str, Path]) -> dict[str, Path]:
    """Models of two more architectures, with fewer layers than the base."""
    found = {}
    for layers in (3, 4):
        folder = adapters["spare"].parent / f"shallow-{layers}"
        shutil.copytree(base_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
        (folder / "config.json").write_text(json.dumps(config))
        with safe_open(base_folder / "model.safetensors", "pt") as weights:
            kept = {n: weights.get_tensor(n) for n in weights.keys() if is_within(n, layers)}  # noqa: SIM118
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        found[f"shallow-{layers}"] = folder
    return found


def is_within(tensor: str, layers: int) -> bool:
    number = re.search(r"\.layers\.(\d+)\.", tensor)
    return number is None or int(number[1]) < layers


def test_two_architectures_are_measured_one_after_the_other(
    cluster: Cluster, shallow: dict[str, Path]
) -> None:
    """Registered at once. Each holds its memory while its engine runs, which the node knows for its own."""
    bodies = [{"model": name, "source": str(folder)} for name, folder in shallow.items()]
    operations = [cluster.submit("POST", "/register_model", body) for body in bodies]
    held: dict[str, int] = {}
    taken: dict[str, int] = {}
    while not all(cluster.get(f"/operations/{one}")["done"] for one in operations):
        assert len(measuring(cluster)) <= 1
        (device,) = cluster.get("/cluster")["nodes"][0]["devices"]
        now = {r["deployment"]: r["bytes"] for r in device["reservations"] if "measuring:" in r["deployment"]}
        assert len(now) <= 1
        held |= now
        for use in device["uses"]:
            if "measuring:" in (use["deployment"] or ""):
                taken[use["deployment"]] = max(use["bytes"], taken.get(use["deployment"], 0))
        time.sleep(0.2)
    ended = [cluster.finish(one) for one in operations]
    found = [cluster.get(f"/models/{name}/profile") for name in shallow]
    print(f"\nheld {held}, taken at most {taken}: {[one['reason'] for one in found]}")
    assert set(held) == {f"measuring:{one['key']}" for one in found} == set(taken)
    assert all(len(one["loads"]) == one["plannedLoads"] for one in found)
    waited = [any("waits until the architecture of" in e["message"] for e in one["events"]) for one in ended]
    assert sorted(waited) == [False, True]
    for name in shallow:
        cluster.perform("DELETE", f"/models/{name}")


def test_a_profile_that_is_cancelled_ends_its_engine_while_that_starts(cluster: Cluster) -> None:
    operation = cluster.submit("POST", f"/models/{BASE}/profile", {"again": True})
    until(lambda: measuring(cluster), 60, "the measuring engine")
    cluster.submit("POST", f"/operations/{operation}/cancel")
    until(lambda: not measuring(cluster), 60, "its end")
    until(lambda: profile(cluster)["phase"] == "Cancelled", 30, "the profile's end")
    assert profile(cluster)["loads"] == []
    (device,) = cluster.get("/cluster")["nodes"][0]["devices"]
    assert not any("measuring:" in r["deployment"] for r in device["reservations"])


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
