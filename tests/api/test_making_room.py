"""Making room over HTTP: what is served already, what cannot fit, and previews of several engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placement.types import Inventory
from testkit.api.installations import Installation
from testkit.in_memory import CPU, TWO_NODES

APART: dict[str, Any] = {"antiAffinity": {"group": "g", "scope": "node"}}


def deploy_apart(asked: Installation) -> None:
    """Two bases on two nodes, either of which has room for both."""
    assert asked.deploy("base")["phase"] == "Deployed"
    asked.cluster.devices = Inventory((replace(CPU, free_bytes=0), TWO_NODES.devices[1]))
    assert asked.deploy("second")["phase"] == "Deployed"
    asked.cluster.devices = TWO_NODES


def test_a_variant_of_a_deployed_base_moves_nothing(two_bases: Installation) -> None:
    deploy_apart(two_bases)
    assert two_bases.register("v1", "base")["phase"] == "Ready"
    before = two_bases.records()
    found = two_bases.post("/rebalance", {"dryRun": False, "deploy": {"model": "v1"}}).json()
    assert (found["goal"], found["possible"]) == ("make room for v1", True)
    assert found["gain"] == "the engine of 'base' serves it already"
    assert (found["moves"], found["began"]) == ([], False)
    assert two_bases.records() == before


def test_a_move_shows_the_time_of_a_token_before_and_after(two_bases: Installation) -> None:
    deploy_apart(two_bases)
    (move,) = two_bases.post("/rebalance", {}).json()["moves"]
    plan = two_bases.http.get(f"/deployments/{move['group']}").json()["plan"]
    assert move["tpotMs"] == plan["estimatedTpotMs"] > 0
    assert move["toTpotMs"] == pytest.approx(move["tpotMs"])


def test_a_model_that_cannot_fit_is_refused_with_the_reason(two_bases: Installation) -> None:
    impossible = {"model": "base", "intent": "latSLO", "SLOs": {"tpot_ms": 1e-9}}
    found = two_bases.post("/rebalance", {"deploy": impossible}).json()
    refused = two_bases.post("/plan", impossible).json()["error"]["message"]
    assert (found["possible"], found["moves"], found["began"]) == (False, [], False)
    assert found["gain"] == f"no moves of engines can do this: {refused}"


def test_a_preview_is_of_all_groups_that_a_deployment_begins_with(two_bases: Installation) -> None:
    for name, counts in (("base", {"min": 2, "max": 2}), ("second", {"min": 0, "max": 5})):
        reply = two_bases.post("/plan", {"model": name, "replicas": counts, **APART})
        assert reply.status_code == 200, reply.text
    before = two_bases.records()
    many: dict[str, Any] = {"model": "base", "replicas": {"min": 5, "max": 5}}
    refused = two_bases.post("/plan", many | APART)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (422, "no_feasible_plan")
    assert error["message"].startswith("'base@2' finds no place next to the 2 placed before it: ")
    assert error["details"]["binding"] == "antiAffinity"
    assert two_bases.records() == before


def test_the_groups_of_a_preview_take_each_others_memory(two_bases: Installation) -> None:
    (rank,) = two_bases.post("/plan", {"model": "base"}).json()["plan"]["ranks"]
    size = int(2.5 * rank["memoryBytes"])
    two_bases.cluster.devices = Inventory((replace(CPU, total_bytes=size, free_bytes=size),))
    two, three = ({"model": "base", "replicas": {"min": n, "max": n}} for n in (2, 3))
    assert two_bases.post("/plan", two).status_code == 200
    error = two_bases.post("/plan", three).json()["error"]
    assert error["message"].startswith("'base@2' finds no place")
    assert error["details"]["binding"] == "memory"
