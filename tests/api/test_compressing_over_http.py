"""Compressing a fine-tune over HTTP: what is accepted, shown on the way and afterwards, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.controller import compress_action
from controlplane.settings import Settings
from testkit.api.installations import Installation, wait_for
from testkit.compressing_cluster import QUALITY, ScriptedCompressor


@pytest.fixture
def scripted() -> ScriptedCompressor:
    made = ScriptedCompressor()
    made.quality = QUALITY
    return made


@pytest.fixture
def served(
    tmp_path: Path, files: Path, scripted: ScriptedCompressor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    """An installation with a base."""
    monkeypatch.setattr(compress_action, "LOOK_S", 0.005)
    settings = Settings(
        home=tmp_path / "home",
        allowed_roots=str(files),
        engine="echo",
        max_model_len=64,
        artifacts=str(tmp_path / "made"),
    )
    with Installation(settings, files, scripted).running() as installation:
        assert installation.register("base")["phase"] == "Ready"
        yield installation


def body(files: Path, name: str = "v", **block: Any) -> dict[str, Any]:
    compression = {"method": "deltacompress", "bits": 2, **block}
    return {"model": name, "source": str(files / "other"), "base": "base", "compression": compression}


def test_a_compression_is_shown_while_it_runs_and_afterwards(
    served: Installation, scripted: ScriptedCompressor, tmp_path: Path
) -> None:
    served.loop.call_soon_threadsafe(scripted.go.clear)
    accepted = served.post("/register_model", body(served.files))
    assert accepted.status_code == 202
    wait_for(lambda: scripted.running)
    view = served.http.get("/models/v").json()
    assert (view["phase"], view["base"], view["source"]) == (
        "Compressing",
        "base",
        str(served.files / "other"),
    )
    shown = view["compression"]
    assert (shown["method"], shown["options"], shown["node"]) == ("deltacompress", {"bits": 2}, "node")
    assert shown["artifact"] is None
    deployments = served.http.get("/cluster").json()["nodes"][0]["devices"][0]["reservations"]
    assert [held["deployment"] for held in deployments] == ["compressing:v"]
    served.loop.call_soon_threadsafe(scripted.go.set)
    assert served.end(accepted)["phase"] == "Ready"
    view = served.http.get("/models/v").json()
    made = view["compression"]["artifact"]
    assert (made["sizeBytes"], made["uncompressedBytes"], made["ratio"]) == (10, 50, 5.0)
    assert made["quality"]["accuracy"] == pytest.approx(95.0)
    assert made["quality"]["losses"][0]["task"] == "sums"
    assert view["compressionTechnique"] == {"none": pytest.approx(95.0)}
    assert Path(view["path"]).is_relative_to(tmp_path / "made"), "as OSTINATO_ARTIFACTS says"


def test_accuracies_of_the_user_stay(served: Installation) -> None:
    given = {**body(served.files), "compressionTechnique": {"none": 99.0}}
    assert served.end(served.post("/register_model", given))["phase"] == "Ready"
    assert served.http.get("/models/v").json()["compressionTechnique"] == {"none": 99.0}


def test_a_broken_limit_is_refused_with_a_feasible_one(served: Installation) -> None:
    assert served.end(served.post("/register_model", body(served.files)))["phase"] == "Ready"
    asked = {"model": "v", "intent": "accSLO", "SLOs": {"accuracy": 96}}
    for path in ("/plan", "/deploy_model"):
        reply = served.post(path, asked)
        assert reply.status_code == 422
        error = reply.json()["error"]
        assert error["code"] == "no_feasible_plan"
        assert error["details"]["relaxations"][0]["offered"] == pytest.approx(95.0)
    assert served.deploy("v", intent="accSLO", SLOs={"accuracy": 95})["phase"] == "Deployed"
    assert served.chat("to be", "v").status_code == 200


def test_a_model_without_an_evaluation_has_no_accuracy(
    served: Installation, scripted: ScriptedCompressor
) -> None:
    scripted.quality = None
    assert served.end(served.post("/register_model", body(served.files)))["phase"] == "Ready"
    assert served.http.get("/models/v").json()["compressionTechnique"] == {}
    reply = served.post("/deploy_model", {"model": "v", "intent": "accSLO", "SLOs": {"accuracy": 1}})
    assert "the accuracy of 'v' is unknown" in reply.json()["error"]["message"]
    assert served.deploy("v")["phase"] == "Deployed", "who asks for none gets it"


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"method": "gzip"}, "compression.method"),
        ({"bits": 3}, "compression.bits"),
        ({"ratio": 0.5}, "compression"),
        ({"maxLoss": 1}, "compression"),
    ],
)
def test_a_block_that_cannot_be_meant(served: Installation, block: dict[str, Any], param: str) -> None:
    reply = served.post("/register_model", body(served.files, **block))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", param), error


def test_the_name_of_a_failed_model_is_free_once_the_model_is_deleted(
    served: Installation, scripted: ScriptedCompressor
) -> None:
    scripted.failure = "expected the same architecture, got another"
    ended = served.end(served.post("/register_model", body(served.files)))
    assert (ended["phase"], ended["error"]["error"]["code"]) == ("Failed", "compression_failed")
    view = served.http.get("/models/v").json()
    assert (view["phase"], view["reason"]) == ("Failed", scripted.failure)
    assert served.post("/register_model", body(served.files)).json()["error"]["code"] == "already_exists"
    assert served.end(served.http.delete("/models/v"))["phase"] == "Deleted"
    scripted.failure = ""
    assert served.end(served.post("/register_model", body(served.files)))["phase"] == "Ready"
