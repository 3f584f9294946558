"""Worker groups on a real cluster: a second one with the load, none and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.cluster.clusters import GIVE_UP_S, Cluster, until
from testkit.cluster.load import Load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

NAME = "many"


@pytest.fixture(scope="module")
def many(echo_cluster: Cluster, base_folder: Path) -> Iterator[Cluster]:
    echo_cluster.perform("POST", "/register_model", {"model": NAME, "source": str(base_folder)})
    yield echo_cluster
    echo_cluster.perform("DELETE", f"/models/{NAME}")


def groups(cluster: Cluster) -> dict[str, str]:
    """Phases by name."""
    return {g["name"]: g["phase"] for g in cluster.get(f"/deployments/{NAME}")["groups"]}


def engines(cluster: Cluster) -> dict[str, str]:
    found: list[dict[str, Any]] = cluster.get("/status")["engines"]
    return {e["group"]: e["status"] for e in found if e["host"] == NAME}


def deploy(cluster: Cluster, **replicas: Any) -> None:
    cluster.perform("POST", "/deploy_model", {"model": NAME, "maxOutputLength": 32, "replicas": replicas})


def ask(cluster: Cluster) -> str:
    body = {"model": NAME, "inputText": "still here", "maxOutputLength": 8}
    reply = cluster.http.post("/inference_model", json=body, timeout=GIVE_UP_S)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["outputText"])


def test_load_brings_a_second_group_and_takes_it_back(many: Cluster) -> None:
    deploy(many, min=1, max=2, targetInFlight=0.5)
    try:
        assert groups(many) == {NAME: "Serving"}
        # More than one request is in flight on average, and half of the cores are left to others.
        with Load(many.url, (NAME,), 16, pause_s=0.05) as load:
            until(lambda: groups(many) == {NAME: "Serving", f"{NAME}@1": "Serving"}, "a second group")
            seen = len(load.outcomes)
            until(lambda: len(load.outcomes) > seen + 50, "answers from both")
            held = [
                r["deployment"]
                for node in many.get("/cluster")["nodes"]
                for device in node["devices"]
                for r in device["reservations"]
            ]
            assert {NAME, f"{NAME}@1"} <= set(held)
        assert [o.error for o in load.outcomes if o.error] == []
        # A minute later one is enough.
        until(lambda: list(groups(many).values()) == ["Serving"], "one group again")
        until(lambda: list(engines(many).values()) == ["running"], "one engine again")
        assert ask(many) == "still here"
    finally:
        many.perform("DELETE", f"/deployments/{NAME}")
    assert engines(many) == {}


def test_a_base_sleeps_and_wakes(many: Cluster) -> None:
    deploy(many, min=0, max=1, idleS=2)
    try:
        until(lambda: not engines(many) and not groups(many), "idle, so no engine runs")
        assert many.get(f"/deployments/{NAME}")["phase"] == "Deployed"
        assert ask(many) == "still here"
        assert engines(many) == {NAME: "running"}
    finally:
        many.perform("DELETE", f"/deployments/{NAME}")


def test_one_host_leaves_nothing_to_move(many: Cluster) -> None:
    found = many.http.post("/rebalance", json={"dryRun": True}).json()
    assert (found["possible"], found["moves"], found["began"]) == (False, [], False)
