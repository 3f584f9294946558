"""`ostinato profile` and `ostinato estimate`, against scripted answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.client.command_line import Cli
from testkit.client.fake_api import FakeApi, answer, error, events, operation

PROFILE = "/models/smol/profile"


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value / 2, "high": value * 2}


def profile(**fields: Any) -> dict[str, Any]:
    load = {"tensorParallel": 1, "layersPerStage": [30], "batch": 4, "inputTokens": 64, "outputTokens": 12}
    view = {"model": "smol", "phase": "Ready", "reason": "4 loads measured in 50 s", "key": "k"}
    what = {"architecture": "Llama-30x576", "dtype": "float32", "device": "a CPU x2", "engineVersion": "0.32"}
    loads = [{**load, "ttftMs": 500.5, "tpotMs": 90.25}]
    return {**view, **what, "seconds": 50.0, "plannedLoads": 4, "loads": loads, **fields}


def estimate(layers: tuple[int, ...] = (30,), latency: float = 900.0, **fields: Any) -> dict[str, Any]:
    rank = {
        **{"rank": 0, "stage": 0, "layers": layers[0], "weightBytes": 1 << 29, "activationBytes": 0},
        **{"graphBytes": 0, "runtimeBytes": 1 << 30, "variantBytes": 1 << 20, "kvCacheBytes": 2 << 20},
        "totalBytes": interval(3 << 29),
    }
    return {
        **{"model": "smol", "basis": "profile", "notes": ["variants were not measured"], "tensorParallel": 1},
        **{"layersPerStage": list(layers), "quantization": "none", "batch": 4, "inputTokens": 64},
        **{"outputTokens": 32, "variants": ["v1"], "ranks": [rank], "memoryBytes": 3.0 * (1 << 29)},
        "variantLoad": {
            **{"requests": 4, "rankSum": 32, "rankMax": 8},
            **{"distinctBytesPerLayer": 9, "boftBlocksPerLayer": 0},
        },
        **{"ttftMs": interval(100), "tpotMs": interval(20), "latencyMs": interval(latency)},
        **{"tokensPerSecond": interval(142), "kvCapacityTokens": 960, "concurrency": 10, "costGibS": 1.35},
        **{"pareto": None, **fields},
    }


@pytest.fixture
def scripted(api: FakeApi) -> FakeApi:
    running = operation("Pending", 0.0, kind="profile_model")
    api.script(f"POST {PROFILE}", answer(running, 202))
    api.script(f"GET {PROFILE}", answer(profile()))
    api.script("POST /models/smol/estimate", answer(estimate()))
    plans = [estimate(pareto=True), estimate((15, 15), 950, pareto=True, costGibS=1.2), estimate((20, 10))]
    api.script("POST /models/smol/plans", answer({"plans": plans}))
    return api


def test_profile_runs_and_shows(scripted: FakeApi, cli: Cli) -> None:
    ended = cli("profile", "smol")
    assert ended.code == 0
    for text in ("a CPU x2, float32, vLLM 0.32", "1 of 4 in 50 s", "500.5 ms", "90.25 ms"):
        assert text in ended.out
    assert "50%" in ended.err  # its progress
    assert scripted.calls(f"POST {PROFILE}")[0][0] == {"again": False}
    as_json = cli("--json", "profile", "smol", "--again")
    assert as_json.json["profile"]["loads"][0]["batch"] == 4
    assert as_json.json["operation"]["phase"] == "Deployed"
    assert scripted.calls(f"POST {PROFILE}")[1][0] == {"again": True}


def test_profile_may_only_look_or_not_wait(scripted: FakeApi, cli: Cli) -> None:
    assert "Ready" in cli("profile", "smol", "--show").out
    assert scripted.calls(f"POST {PROFILE}") == []
    assert cli("profile", "smol", "--no-wait").out == "op-1\n"
    assert cli("profile", "smol", "--show", "--again").code == 2


def test_a_profile_that_fails(scripted: FakeApi, cli: Cli) -> None:
    failed = operation("Failed", error=error("profiling_failed", "it was killed"))
    scripted.script("GET /operations/op-1/watch", events(failed))
    ended = cli("profile", "smol")
    assert ended.code == 1
    assert "it was killed" in ended.err
    assert "estimates are rough" in ended.err


def test_estimate_asks_and_shows_intervals(scripted: FakeApi, cli: Cli) -> None:
    options = ("--tp", "3", "--layers", "10,20", "--batch", "4", "--input", "64", "--output", "32")
    ended = cli("estimate", "smol", *options, "--variants", "v1, smol")
    assert ended.code == 0
    for text in (
        *("measured on this kind of device", "100 (50 to 200) ms", "142 (71 to 284) tokens/s"),
        *(
            "room for 960 tokens; an engine runs 10 such requests at once",
            "ranks add up to 32, the largest is 8",
            "1.5 GiB",
            "768.0 MiB",
        ),
        "variants were not measured",
    ):
        assert text in ended.out
    body, _ = scripted.calls("POST /models/smol/estimate")[0]
    assert body == {
        **{"tensorParallel": 3, "layersPerStage": [10, 20], "quantization": "none", "batch": 4},
        **{"inputTokens": 64, "outputTokens": 32, "variants": ["v1", "smol"]},
    }
    assert cli("estimate", "smol", "--json").json["estimate"]["concurrency"] == 10


def test_a_rough_estimate_is_marked_as_rough(scripted: FakeApi, cli: Cli) -> None:
    scripted.script("POST /models/smol/estimate", answer(estimate(basis="rough", concurrency=None)))
    assert "rough: not measured" in cli("estimate", "smol").out


@pytest.mark.slow  # matplotlib takes seconds to import
def test_plans_are_drawn(scripted: FakeApi, cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "plans.png"
    ended = cli("estimate", "smol", "--plot", str(picture), "--devices", "2")
    assert ended.code == 0, ended.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ended.out.count("best of its kind") == 2
    assert scripted.calls("POST /models/smol/plans")[0][0]["devices"] == 2
    assert len(cli("estimate", "smol", "--plot", str(picture), "--json").json["plans"]) == 3
    nowhere = cli("estimate", "smol", "--plot", str(tmp_path / "no" / "folder.png"))
    assert (nowhere.code, "cannot be written" in nowhere.err) == (1, True)


def test_an_impossible_split_is_refused(scripted: FakeApi, cli: Cli) -> None:
    wrong = cli("estimate", "smol", "--layers", "ten,22")
    assert (wrong.code, "such as 10,22" in wrong.err) == (2, True)
    scripted.script(
        "POST /models/smol/estimate", answer(error("invalid_request", "expected 30, got 29; change it"), 400)
    )
    refused = cli("estimate", "smol", "--layers", "10,19")
    assert (refused.code, "expected 30, got 29" in refused.err) == (1, True)


def test_an_estimate_shows_request_path_and_engine_separately(scripted: FakeApi, cli: Cli) -> None:
    shown = cli("estimate", "smol").out
    assert "the request path" not in shown
    apart = estimate(ttftMs=interval(110), engineTtftMs=interval(100), pathMs=interval(10))
    scripted.script("POST /models/smol/estimate", answer(apart))
    shown = cli("estimate", "smol").out
    assert "110 (55 to 220) ms" in shown
    assert "the request path 10 (5 to 20) ms, engine 100 (50 to 200) ms" in " ".join(shown.split())
