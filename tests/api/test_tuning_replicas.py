"""PATCH /deployments/{name} with replicas: what changes, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from testkit.api.installations import Installation, wait_for


@pytest.fixture
def served(fresh: Installation) -> Installation:
    fresh.up("v1")
    return fresh


def patch(asked: Installation, name: str = "base", **body: Any) -> httpx.Response:
    return asked.http.patch(f"/deployments/{name}", json=body)


def phases(asked: Installation) -> list[str]:
    return [g["phase"] for g in asked.http.get("/deployments/base").json()["groups"]]


def test_replicas_are_raised_and_lowered(served: Installation) -> None:
    served.cluster.requests = None  # bounds hold while the gateways are silent, too
    reply = patch(served, replicas={"min": 2, "max": 2})
    assert reply.status_code == 200, reply.text
    assert reply.json()["replicas"] == {"min": 2, "max": 2, "targetInFlight": None, "idleS": 300.0}
    wait_for(lambda: phases(served) == ["Serving", "Serving"])
    reply = patch(served, replicas={"targetInFlight": 5, "idleS": 7}, maxActiveVariants=1)
    assert reply.json()["replicas"] == {"min": 2, "max": 2, "targetInFlight": 5.0, "idleS": 7.0}
    assert reply.json()["maxActiveVariants"] == 1
    reply = patch(served, replicas={"min": 1, "max": 1, "targetInFlight": None})
    assert reply.json()["replicas"]["targetInFlight"] is None
    assert sorted(phases(served)) == ["Draining", "Serving"]
    assert served.chat("hello", "v1").status_code == 200


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("base", {}),
        ("base", {"replicas": {}}),
        ("base", {"replicas": {"min": 2}}),
        ("base", {"replicas": {"max": 65}}),
        ("base", {"replicas": {"targetInFlight": 1e-308}}),
        ("base", {"replicas": {"most": 2}}),
        ("base", {"replicas": {"min": 2, "max": 2}, "maxActiveVariants": 1000}),
        ("v1", {"replicas": {"max": 2}}),
    ],
)
def test_replicas_that_cannot_be(served: Installation, name: str, body: dict[str, Any]) -> None:
    before = served.records()
    reply = patch(served, name, **body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert served.records() == before


def test_replicas_of_an_unknown_model_are_refused(served: Installation) -> None:
    assert patch(served, "nobody", replicas={"max": 2}).json()["error"]["code"] == "not_deployed"


def test_a_variant_of_a_deployed_base_brings_no_replicas(served: Installation) -> None:
    assert served.register("v2", "base", folder="v1")["phase"] == "Ready"
    before = served.records()
    for path in ("/deploy_model", "/plan"):
        reply = served.post(path, {"model": "v2", "replicas": {"min": 3, "max": 3}})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "replicas")
    assert served.records() == before
    assert served.deploy("v2")["phase"] == "Deployed"


# --- targets -------------------------------------------------------------------------------------


def test_targets_are_deployed_shown_and_changed(fresh: Installation) -> None:
    fresh.register("base")
    fresh.register("v1", "base")
    asked = {"ttft_ms": 250.0, "priority": "high", "late": "drop"}
    assert fresh.deploy("base", targets=asked)["phase"] == "Deployed"
    assert fresh.deploy("v1")["phase"] == "Deployed"
    nothing = dict.fromkeys(("ttft_ms", "tpot_ms", "deadline_ms", "priority", "late"))
    assert fresh.http.get("/deployments/base").json()["targets"] == nothing | asked
    assert patch(fresh, "v1", targets={"deadline_ms": 900}).json()["targets"] == nothing | {
        "deadline_ms": 900
    }
    changed = patch(fresh, targets={"ttft_ms": None, "late": "finish"})
    assert changed.json()["targets"] == nothing | {"priority": "high", "late": "finish"}


@pytest.mark.parametrize(
    "targets",
    [{}, {"ttft_ms": 0}, {"tpot_ms": 1e9}, {"priority": "urgent"}, {"late": "never"}, {"e2e_ms": 5}],
)
def test_targets_that_cannot_be(served: Installation, targets: dict[str, Any]) -> None:
    before = served.records()[1]
    reply = patch(served, targets=targets)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert served.records()[1] == before
