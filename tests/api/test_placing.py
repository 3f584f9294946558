"""Deploying by intent over HTTP: previews that change nothing, structured refusals, permission to relax."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from testkit.api.installations import Installation

IMPOSSIBLE: dict[str, Any] = {"intent": "latSLO", "SLOs": {"tpot_ms": 1e-9}}


@pytest.fixture
def registered(fresh: Installation) -> Installation:
    assert fresh.register("base")["phase"] == "Ready"
    return fresh


def preview(asked: Installation, name: str = "base", **options: object) -> httpx.Response:
    return asked.post("/plan", {"model": name, **options})


def test_a_preview_is_what_deploying_then_does(registered: Installation) -> None:
    options: dict[str, Any] = {
        "maxOutputLength": 32,
        "intent": "minMem",
        "load": {"ratePerS": 0.5, "inputTokens": 20, "outputTokens": 16},
        "tensorParallel": [1],
        "antiAffinity": {"group": "g"},
    }
    before = registered.records()
    reply = preview(registered, **options)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert registered.records() == before
    assert (found["model"], found["host"], found["running"]) == ("base", "base", False)
    assert registered.deploy("base", **options)["phase"] == "Deployed"
    deployed = registered.http.get("/deployments/base").json()
    assert deployed["plan"] == found["plan"]
    assert (deployed["intent"], deployed["tensorParallel"]) == ("minMem", [1])
    assert deployed["load"] == options["load"]
    assert deployed["antiAffinity"] == {"group": "g", "scope": "node"}


def test_the_choice_is_explained(registered: Installation) -> None:
    choice = preview(registered, load={"ratePerS": 2.0}).json()["plan"]["choice"]
    assert (choice["unit"], choice["basis"]) == ("GiB s", "rough")
    assert choice["ttftMs"]["low"] < choice["ttftMs"]["value"] < choice["ttftMs"]["high"]
    assert choice["alternatives"] >= 1
    assert choice["throughputPerS"] > 2.0
    assert 0 < choice["utilisation"][0] < 1
    assert choice["relaxed"] == []


def test_a_variant_s_preview_is_that_of_its_base(registered: Installation) -> None:
    assert registered.register("v1", "base")["phase"] == "Ready"
    found = preview(registered, "v1").json()
    assert (found["model"], found["host"], found["running"]) == ("v1", "base", False)
    assert registered.deploy("base")["phase"] == "Deployed"
    found = preview(registered, "v1").json()
    assert found["running"] is True
    assert found["plan"] == registered.http.get("/deployments/base").json()["plan"]


def test_a_preview_is_refused_as_deploying_would_be(registered: Installation) -> None:
    assert preview(registered, "nobody").status_code == 404
    assert registered.deploy("base")["phase"] == "Deployed"
    assert preview(registered).json()["error"]["code"] == "already_exists"


def test_nothing_feasible_is_answered_alike_by_both(registered: Installation) -> None:
    shown = preview(registered, **IMPOSSIBLE)
    assert shown.status_code == 422
    ended = registered.deploy("base", **IMPOSSIBLE)
    assert ended["phase"] == "Failed"
    assert ended["error"] == shown.json()
    details = ended["error"]["error"]["details"]
    assert details["binding"] == "SLOs.tpot_ms"
    (one,) = details["relaxations"]
    assert set(one) == {"constraint", "asked", "offered", "factor", "text"}
    met = registered.deploy("base", intent="latSLO", SLOs={"tpot_ms": one["offered"]})
    assert met["phase"] == "Deployed"


def test_the_answer_names_the_relaxed_limits(registered: Installation) -> None:
    refused = preview(registered, **IMPOSSIBLE, autoRelax={"maxFactor": 10}).json()["error"]
    assert "allowed 10 times" in refused["message"]
    assert registered.deploy("base", **IMPOSSIBLE, autoRelax={})["phase"] == "Deployed"
    deployed = registered.http.get("/deployments/base").json()
    (one,) = deployed["plan"]["choice"]["relaxed"]
    assert one["constraint"] == "SLOs.tpot_ms"
    assert deployed["autoRelax"] == {"maxFactor": None}
    assert deployed["SLOs"]["tpot_ms"] == pytest.approx(1e-9)
    assert "relaxed, as allowed" in deployed["plan"]["reason"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"layersPerStage": [1, 2]}, "layersPerStage"),
        ({"layersPerStage": [2], "pipelineParallel": [2]}, None),
        ({"tensorParallel": [3]}, "tensorParallel"),
        ({"tensorParallel": [0]}, "tensorParallel.0"),
        ({"load": {"ratePerS": -1}}, "load.ratePerS"),
        ({"load": {"rate": 1}}, "load.rate"),
        ({"antiAffinity": {"scope": "node"}}, "antiAffinity.group"),
        ({"antiAffinity": {"group": "g", "scope": "rack"}}, "antiAffinity.scope"),
        ({"autoRelax": {"maxFactor": 0.5}}, "autoRelax.maxFactor"),
        ({"intent": "cheap"}, "intent"),
        ({"SLOs": {"cost": 0}}, "SLOs.cost"),
    ],
)
def test_a_nonsensical_field_is_refused_by_its_name(
    registered: Installation, asked: dict[str, object], param: str | None
) -> None:
    for path in ("/plan", "/deploy_model"):
        reply = registered.post(path, {"model": "base", **asked})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "invalid_request"), reply.text
        if param is not None:
            assert param in f"{error['param']} {error['message']}"
