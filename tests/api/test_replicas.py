"""Replicas and rebalancing over HTTP: requests, views and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement.types import Inventory
from testkit.api.installations import Installation, wait_for
from testkit.in_memory import CPU, TWO_NODES


def described(asked: Installation, name: str = "base") -> dict[str, Any]:
    found: dict[str, Any] = asked.http.get(f"/deployments/{name}").json()
    return found


def test_two_groups_are_shown_and_answer(two_bases: Installation) -> None:
    options = {"replicas": {"min": 2, "max": 2}, "antiAffinity": {"group": "g"}}
    assert two_bases.deploy("base", **options)["phase"] == "Deployed"
    wait_for(lambda: [g["phase"] for g in described(two_bases)["groups"]] == ["Serving", "Serving"])
    found = described(two_bases)
    assert found["replicas"] == {"min": 2, "max": 2, "targetInFlight": None, "idleS": 300.0}
    assert [g["name"] for g in found["groups"]] == ["base", "base@1"]
    assert {r["node"] for g in found["groups"] for r in g["plan"]["ranks"]} == {"node", "other"}
    assert found["plan"] == found["groups"][0]["plan"]
    engines = two_bases.http.get("/status").json()["engines"]
    assert [(e["host"], e["group"]) for e in engines] == [("base", "base"), ("base", "base@1")]
    held = two_bases.http.get("/cluster").json()["nodes"]
    assert {r["deployment"] for n in held for d in n["devices"] for r in d["reservations"]} == {
        "base",
        "base@1",
    }
    assert two_bases.chat("hello").status_code == 200


@pytest.mark.parametrize(
    "replicas",
    [
        {"min": 3, "max": 2},
        {"min": -1},
        {"max": 0},
        {"max": 65},
        {"targetInFlight": 0},
        {"targetInFlight": "many"},
        {"idleS": 0},
        {"most": 3},
        3,
    ],
)
def test_replicas_that_cannot_be(two_bases: Installation, replicas: Any) -> None:
    before = two_bases.records()
    reply = two_bases.post("/deploy_model", {"model": "base", "replicas": replicas})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert two_bases.records() == before


def test_a_dry_run_changes_nothing_and_a_move_frees_a_node(two_bases: Installation) -> None:
    assert two_bases.deploy("base")["phase"] == "Deployed"
    two_bases.cluster.devices = Inventory((replace(CPU, free_bytes=0), TWO_NODES.devices[1]))
    assert two_bases.deploy("second")["phase"] == "Deployed"
    two_bases.cluster.devices = TWO_NODES
    before = two_bases.records()
    found = two_bases.post("/rebalance", {}).json()
    assert two_bases.records() == before
    assert (found["goal"], found["possible"], found["began"]) == ("free a device", True, False)
    (move,) = found["moves"]
    assert {move["ranks"][0]["node"], move["to"][0]["node"]} == {"node", "other"}
    assert move["doubledBytes"] == move["ranks"][0]["memoryBytes"]
    assert found["loadBytes"] == move["loadBytes"] > 0
    assert two_bases.post("/rebalance", {"dryRun": False}).json()["began"] is True
    name = move["group"]
    wait_for(lambda: f"{name}@1" in [g["name"] for g in described(two_bases, name)["groups"]])
    wait_for(lambda: {g["phase"] for g in described(two_bases, name)["groups"]} <= {"Serving", "Draining"})
    assert two_bases.chat("hello", name).status_code == 200


def test_a_model_that_fits_needs_no_moves(two_bases: Installation) -> None:
    reply = two_bases.post("/rebalance", {"deploy": {"model": "base"}}).json()
    assert (reply["possible"], reply["moves"]) == (True, [])
    assert "without any move" in reply["gain"]
    unknown = two_bases.post("/rebalance", {"deploy": {"model": "nobody"}})
    assert unknown.json()["error"]["code"] == "model_not_found"
    refused = two_bases.post("/rebalance", {"dry": True})
    assert refused.json()["error"]["code"] == "invalid_request"
