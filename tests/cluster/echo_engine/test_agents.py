"""A node's agent and the ledger on a real Ray cluster: killed, stopped, reserved, released."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from testkit.cluster.clusters import Cluster, scrape, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE = "smol"
NOWHERE = "203.0.113.1"  # an address of documentation's: no engine can listen there


def the_node(cluster: Cluster) -> dict[str, Any]:
    (node,) = cluster.get("/cluster")["nodes"]
    return dict(node)


def usable(cluster: Cluster, other_than: int = 0) -> Callable[[], dict[str, Any] | None]:
    """The node when something may be placed on it again, by an agent other than this."""

    def look() -> dict[str, Any] | None:
        node = the_node(cluster)
        return node if node["usable"] and node["agentPid"] != other_than else None

    return look


def reservations(cluster: Cluster) -> list[tuple[str, int, int, float]]:
    return [
        (r["deployment"], r["rank"], r["bytes"], r["since"])
        for node in cluster.get("/cluster")["nodes"]
        for device in node["devices"]
        for r in device["reservations"]
    ]


def test_the_cluster_lists_the_holders_of_memory(echo_cluster: Cluster) -> None:
    node = until(usable(echo_cluster), "a usable node")
    (device,) = node["devices"]
    engine = echo_cluster.replica(f"model-{BASE}", "Engine")
    assert device["kind"] == "cpu"
    assert device["totalBytes"] <= psutil.virtual_memory().total
    assert 0 < device["usedBytes"] < device["totalBytes"]
    assert 0 <= device["load"] <= 1
    assert node["cores"] <= (os.cpu_count() or 1)
    assert node["reportAgeS"] < 5
    plan = echo_cluster.get(f"/deployments/{BASE}")["plan"]
    promised = [(r["rank"], r["memoryBytes"]) for r in plan["ranks"]]
    assert [(r["rank"], r["bytes"]) for r in device["reservations"]] == promised
    # The engine is known by its process; the files it maps are not counted as its own.
    until(lambda: 1 << 20 < taken_by(echo_cluster, BASE) < engine.memory_info().rss, "its memory")
    largest = device["totalBytes"] - device["headroomBytes"] - sum(size for _, size in promised)
    assert 0 < device["freeBytes"] <= largest


def taken_by(cluster: Cluster, base: str) -> int:
    """The memory of its device that the node attributes to the engine of `base`."""
    (device,) = the_node(cluster)["devices"]
    (taken,) = [use["bytes"] for use in device["uses"] if use["deployment"] == base]
    return int(taken)


def test_devices_are_metrics_of_the_controller(echo_cluster: Cluster) -> None:
    assert of_controller(echo_cluster, "ostinato_device_memory_bytes") > 0
    assert of_controller(echo_cluster, "ostinato_node_report_age_seconds") < 10
    assert of_controller(echo_cluster, "ostinato_node_usable") == 1


def of_controller(cluster: Cluster, name: str) -> float:
    """A metric of the controller."""
    targets = cluster.get("/metrics/targets")
    (address,) = [t["targets"][0] for t in targets if t["labels"]["component"] == "controller"]
    return scrape(address, name)


def components(cluster: Cluster) -> set[str]:
    return {target["labels"]["component"] for target in cluster.get("/metrics/targets")}


def test_processes_that_hang_hide_no_other_from_prometheus(echo_cluster: Cluster) -> None:
    everything = {"gateway", "controller", f"engine-{BASE}"}
    until(lambda: components(echo_cluster) == everything, "every process")
    hung = [
        echo_cluster.replica(f"model-{BASE}", "Engine"),
        echo_cluster.replica("ostinato", "Controller"),
    ]
    try:
        for process in hung:
            process.suspend()
        assert components(echo_cluster) == {"gateway"}
    finally:
        for process in hung:
            process.resume()
    until(lambda: components(echo_cluster) == everything, "those that hung")


def test_an_agent_that_is_killed_is_replaced(echo_cluster: Cluster) -> None:
    until(usable(echo_cluster), "a usable node")
    before = reservations(echo_cluster)
    for _ in range(2):
        pid = the_node(echo_cluster)["agentPid"]
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        node = until(usable(echo_cluster, other_than=pid), "another agent")
        print(f"\nagent killed: another reports {time.monotonic() - killed:.1f} s later")
        assert node["devices"][0]["totalBytes"] > 0
        assert node["reportAgeS"] < 5
    assert reservations(echo_cluster) == before


def test_a_node_that_does_not_report_gets_nothing_new(echo_cluster: Cluster) -> None:
    """Its agent is stopped, not killed: no request waits for it, deployed models are served, and a first
    deployment is placed once the agent reports again."""
    pid = until(usable(echo_cluster), "a usable node")["agentPid"]
    echo_cluster.perform(
        "POST", "/register_model", {"model": "later", "source": echo_cluster.get(f"/models/{BASE}")["source"]}
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        node = until(
            lambda: None if (n := the_node(echo_cluster))["usable"] else n, "a node that is not used"
        )
        noticed_s = time.monotonic() - stopped
        assert node["reason"].startswith(f"stale report: the last report of node {node['name']} was ")
        # Each process keeps its own watch; the controller's decides.
        until(lambda: not of_controller(echo_cluster, "ostinato_node_usable"), "the controller's")
        operation = echo_cluster.submit("POST", "/deploy_model", {"model": "later"})
        waits = f"waits until node {node['name']} reports again"
        until(lambda: waits in told(echo_cluster, operation), "the reason why the deployment waits")
        body = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert echo_cluster.http.post("/v1/chat/completions", json=body).status_code == 200
    finally:
        with contextlib.suppress(ProcessLookupError):  # after a while it is replaced
            os.kill(pid, signal.SIGCONT)
    until(lambda: of_controller(echo_cluster, "ostinato_node_usable"), "a usable node")
    print(f"\nagent stopped: noticed after {noticed_s:.1f} s")
    both = {BASE, "later"}
    until(lambda: {holder for holder, *_ in reservations(echo_cluster)} == both, "a reservation")
    echo_cluster.submit("POST", f"/operations/{operation}/cancel")
    ended = until(lambda: _ended(echo_cluster, operation), "the end of the launch")
    if ended["phase"] == "Deployed":  # it was quicker
        echo_cluster.perform("DELETE", "/deployments/later")
    assert {holder for holder, *_ in reservations(echo_cluster)} == {BASE}
    echo_cluster.http.delete("/models/later").raise_for_status()


def told(cluster: Cluster, operation: str) -> str:
    """All that the operation has said so far."""
    events = cluster.get(f"/operations/{operation}")["events"]
    return "\n".join(event["message"] for event in events)


def _ended(cluster: Cluster, operation: str) -> dict[str, Any] | None:
    found: dict[str, Any] = cluster.get(f"/operations/{operation}")
    return found if found["done"] else None


def test_reservations_outlive_the_controller(echo_cluster: Cluster) -> None:
    before = reservations(echo_cluster)
    agent = the_node(echo_cluster)["agentPid"]
    assert [holder for holder, *_ in before] == [BASE]
    old = echo_cluster.replica("ostinato", "Controller")
    old.kill()
    assert reservations(echo_cluster) == before
    until(lambda: echo_cluster.replica("ostinato", "Controller").pid != old.pid, "a new controller")
    node = until(usable(echo_cluster), "a usable node")
    assert node["agentPid"] == agent  # it has the samples of before
    assert reservations(echo_cluster) == before


@pytest.fixture
def failing_cluster(base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """No engine of the group can open its server. Another user ran Ray with a token here before."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    cluster = Cluster("echo", str(base_folder.parent), worker_host=NOWHERE)
    try:
        cluster.up()
        yield cluster
        cluster.down()
    finally:
        cluster.discard()


def test_a_launch_that_fails_releases_what_it_reserved(failing_cluster: Cluster, base_folder: Path) -> None:
    failing_cluster.perform("POST", "/register_model", {"model": BASE, "source": str(base_folder)})
    operation = failing_cluster.submit("POST", "/deploy_model", {"model": BASE})
    failed = until(lambda: _ended(failing_cluster, operation), "the launch to fail")
    assert failed["error"]["error"]["code"] == "engine_failed", failed
    assert any("starting the engine" in event["message"] for event in failed["events"]), "reserved before"
    assert reservations(failing_cluster) == []
