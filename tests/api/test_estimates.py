"""Profiles and estimates over HTTP: reported figures equal measured ones, and nonsense is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.controller import controller as controller_module
from controlplane.settings import Settings
from testkit import checkpoints
from testkit.api.installations import Installation
from testkit.measured_cluster import TPOT_S, MeasuredCluster


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A base that was profiled, two variants, and a node that can measure."""
    home, files = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("files")
    checkpoints.write_model(files / "base")
    for name in ("v1", "v2"):
        checkpoints.write_adapter(files / name)
    chosen = Settings(home=home, allowed_roots=str(files), engine="vllm", max_model_len=64, max_variants=4)
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(controller_module, "TICK_S", 0.005)
        quick.setattr(controller_module, "OBSERVE_EVERY_S", 0.05)
        with Installation(chosen, files, MeasuredCluster()).running() as made:
            assert made.register("base")["phase"] == "Ready"
            for name in ("v1", "v2"):
                assert made.register(name, "base")["phase"] == "Ready"
            yield made


def ask(installation: Installation, model: str = "base", **body: Any) -> dict[str, Any]:
    reply = installation.post(f"/models/{model}/estimate", body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_the_profile_is_shown(profiled: Installation) -> None:
    found = profiled.http.get("/models/base/profile").json()
    assert (found["model"], found["phase"], found["device"]) == ("base", "Ready", "a CPU x2")
    assert len(found["loads"]) == found["plannedLoads"] > 0
    assert {load["tpotMs"] for load in found["loads"]} == {TPOT_S * 1e3}
    assert profiled.http.get("/models/v1/profile").json() == found
    assert profiled.http.get("/models/nobody/profile").json()["error"]["code"] == "model_not_found"


def test_a_profile_that_is_whole_ends_at_once_and_can_be_measured_again(profiled: Installation) -> None:
    cluster = profiled.cluster
    assert isinstance(cluster, MeasuredCluster)
    told = cluster.told
    ended = profiled.end(profiled.post("/models/base/profile", {}))
    assert (ended["kind"], ended["target"], ended["phase"]) == ("profile_model", "base", "Ready")
    assert cluster.told == told
    assert profiled.end(profiled.post("/models/v1/profile", {"again": True}))["phase"] == "Ready"
    assert cluster.told == 2 * told


def test_an_estimate_is_what_was_measured(profiled: Installation) -> None:
    found = ask(profiled, batch=1, inputTokens=16, outputTokens=8)
    assert (found["model"], found["basis"], found["layersPerStage"]) == ("base", "profile", [2])
    tpot = found["tpotMs"]
    assert tpot["value"] == pytest.approx(TPOT_S * 1e3, rel=0.05)
    assert tpot["low"] < tpot["value"] < tpot["high"]
    assert found["latencyMs"]["value"] == pytest.approx(found["ttftMs"]["value"] + 7 * tpot["value"])
    assert found["tokensPerSecond"]["value"] == pytest.approx(8e3 / found["latencyMs"]["value"])
    (rank,) = found["ranks"]
    assert rank["kvCacheBytes"] == 24 * 2 * 2 * 4 * 4  # K and V, 2 layers, 1 head of 4, 4 bytes
    assert found["memoryBytes"] == rank["totalBytes"]["value"]
    # Memory would hold thousands; an engine on a CPU is started for fewer.
    assert found["kvCapacityTokens"] // 24 > 1000
    assert found["concurrency"] == 16
    assert found["costGibS"] == pytest.approx(
        found["memoryBytes"] / 2**30 * found["latencyMs"]["value"] / 1e3
    )


def test_a_split_may_be_uneven_or_even(profiled: Installation) -> None:
    assert ask(profiled, layersPerStage=[1, 1], inputTokens=8, outputTokens=8)["layersPerStage"] == [1, 1]
    assert ask(profiled, pipelineParallel=2, inputTokens=8, outputTokens=8)["layersPerStage"] == [1, 1]


def test_an_estimate_counts_variants_in_the_batch(profiled: Installation) -> None:
    """Rank 4 each; a variant's own estimate asks for it alone."""
    load: dict[str, Any] = {"batch": 3, "inputTokens": 8, "outputTokens": 8}
    mixed = ask(profiled, **load, variants=["v1", "v2", "base"])
    assert (mixed["variantLoad"]["requests"], mixed["variantLoad"]["rankMax"]) == (2, 4)
    assert mixed["variantLoad"]["rankSum"] == 8
    alone = ask(profiled, **load)
    assert alone["variantLoad"] is None
    assert mixed["tpotMs"]["value"] > alone["tpotMs"]["value"]
    own = ask(profiled, "v1", **load)
    assert (own["model"], own["variants"], own["variantLoad"]["rankSum"]) == ("base", ["v1"], 12)


def test_an_estimate_says_that_variants_beyond_the_slots_wait(profiled: Installation) -> None:
    names = ["v1", "v2", "w1", "w2", "w3"]
    for name in names[2:]:
        checkpoints.write_adapter(profiled.files / name)
        assert profiled.register(name, "base")["phase"] == "Ready"
    together = ask(profiled, batch=5, inputTokens=8, outputTokens=4, variants=names[:4])
    assert together["variantsAtOnce"] == {"registered": 5, "atOnce": 4, "tooLarge": []}
    assert "run at once" not in " ".join(together["notes"])
    waiting = ask(profiled, batch=5, inputTokens=8, outputTokens=4, variants=names)
    assert any(note.startswith("only 4 of these 5 variants run at once") for note in waiting["notes"])
    for name in names[2:]:
        profiled.end(profiled.http.delete(f"/models/{name}"))


def test_estimates_list_all_plans_and_mark_their_front(profiled: Installation) -> None:
    load = {"inputTokens": 8, "outputTokens": 8}
    plans = profiled.post("/models/base/plans", load | {"devices": 2}).json()["plans"]
    assert [(p["tensorParallel"], p["layersPerStage"]) for p in plans[:2]] == [(1, [2]), (1, [1, 1])]
    assert any(p["pareto"] for p in plans)
    assert len(profiled.post("/models/base/plans", load).json()["plans"]) == 1  # there is one device
    for devices in (65, 0):
        refused = profiled.post("/models/base/plans", load | {"devices": devices})
        assert refused.json()["error"]["param"] == "devices"


def test_ranks_share_one_host_or_use_one_host_each(profiled: Installation) -> None:
    """Two stages on one host take turns: what the whole takes, less sure. On two hosts the like, surer."""
    split: dict[str, Any] = {"layersPerStage": [1, 1], "batch": 1, "inputTokens": 8, "outputTokens": 8}
    whole = ask(profiled, batch=1, inputTokens=8, outputTokens=8)
    shared, apart = ask(profiled, **split), ask(profiled, **split, devices=2)
    assert shared["tpotMs"]["value"] == pytest.approx(whole["tpotMs"]["value"] + 0.11)
    assert any("share a device" in note for note in shared["notes"])
    assert not any("share a device" in note for note in apart["notes"])
    assert apart["kvCapacityTokens"] > 2 * shared["kvCapacityTokens"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tensorParallel": 7}, "tensorParallel", "heads cannot be split 7 ways"),
        ({"layersPerStage": [1, 2]}, "layersPerStage", "got 1,2 (sum 3)"),
        ({"layersPerStage": []}, "layersPerStage", "got none"),
        ({"pipelineParallel": 0}, "pipelineParallel", "expected 1 to 2 stages"),
        ({"pipelineParallel": 10**9}, "pipelineParallel", "expected 1 to 2 stages"),
        (
            {"pipelineParallel": 1, "layersPerStage": [1, 1]},
            "layersPerStage",
            "leave one of the fields out",
        ),
        ({"quantization": "int3"}, "quantization", "got 'int3'"),
        ({"batch": -1}, "batch", "got -1"),
        ({"inputTokens": 10**30}, "inputTokens", "expected inputTokens of 1 to"),
        ({"inputTokens": 60, "outputTokens": 60}, "inputTokens", "at most 64 tokens"),
        ({"layersPerStage": [1, 1], "devices": 1}, "devices", "expected 2 to 64 devices for 2 ranks, got 1"),
        ({"variants": ["v1", "ghost"]}, "variants", "got 'ghost'"),
        ({"batch": "many"}, "batch", "integer"),
        ({"tokens": 3}, "tokens", ""),
    ],
)
def test_wrong_fields_are_named(profiled: Installation, body: dict[str, Any], param: str, said: str) -> None:
    small = {"inputTokens": 8, "outputTokens": 8}
    reply = profiled.post("/models/base/estimate", small | body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "invalid_request")
    assert error["param"].startswith(param)
    assert said in error["message"]


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tensorParallel": st.integers(-2, 9) | st.integers(),
            "pipelineParallel": st.none() | st.integers(-1, 4) | st.integers(),
            "layersPerStage": st.none() | st.lists(st.integers(-1, 3), max_size=4),
            "quantization": st.sampled_from(["none", "bf16", "int4", ""]),
            "batch": st.integers(-1, 40) | st.integers(),
            "inputTokens": st.integers(-1, 80) | st.integers(),
            "outputTokens": st.integers(-1, 80) | st.integers(),
            "variants": st.lists(st.sampled_from(["v1", "v2", "base", "ghost"]), max_size=3),
        },
    )
)
def test_any_question_is_answered_or_refused(profiled: Installation, body: dict[str, Any]) -> None:
    reply = profiled.post("/models/base/estimate", body)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["param"]


def test_an_estimate_says_that_requests_beyond_the_limit_wait(profiled: Installation) -> None:
    most = 16  # on a CPU
    within, beyond = (ask(profiled, batch=batch, inputTokens=8, outputTokens=8) for batch in (most, most + 1))
    assert not any("at once" in note for note in within["notes"])
    assert any(
        f"an engine runs {most} of these {most + 1} requests at once" in note for note in beyond["notes"]
    )


def test_a_busy_device_is_reported_and_its_ranges_are_wider(
    profiled: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is that of foreign processes. The load of our own measurement will be gone: a deployment right
    after it is judged as on an idle device."""
    load: dict[str, Any] = {"batch": 2, "inputTokens": 8, "outputTokens": 8}
    devices = profiled.cluster.devices
    (device,) = devices.devices
    idle = ask(profiled, **load)

    def worked(**changes: Any) -> dict[str, Any]:
        changed = replace(devices, devices=(replace(device, **changes),))
        monkeypatch.setattr(profiled.cluster, "devices", changed)
        return ask(profiled, **load)

    own = worked(load=0.9, work=(("measuring:k", 0.7), ("control-plane:", 0.15)))
    assert own == idle
    stranger = worked(load=0.9, work=(("measuring:k", 0.4),))
    assert any("other work keeps the device 50% busy" in note for note in stranger["notes"])
    for figure in ("ttftMs", "tpotMs", "latencyMs"):
        assert stranger[figure]["value"] == idle[figure]["value"]
        assert stranger[figure]["high"] == pytest.approx(2 * idle[figure]["high"])
    expected = {"inputTokens": 8, "outputTokens": 8}
    plan = {"model": "base", "intent": "latSLO", "maxOutputLength": 8, "load": expected}
    slos = {"ttft_ms": 1.5 * idle["engineTtftMs"]["high"], "tpot_ms": 1.1 * idle["tpotMs"]["high"]}
    worked(load=0.9, work=(("measuring:k", 0.8),))
    seen = profiled.post("/plan", {**plan, "SLOs": slos})
    assert seen.status_code == 200, seen.text
    worked(load=0.9, work=())
    refused = profiled.post("/plan", {**plan, "SLOs": slos})
    assert refused.json()["error"]["code"] == "no_feasible_plan"


def test_status_and_cluster_report_the_same_free_memory(profiled: Installation) -> None:
    (device,) = profiled.http.get("/status").json()["devices"]
    (node,) = profiled.http.get("/cluster").json()["nodes"]
    assert device["freeBytes"] == node["devices"][0]["freeBytes"] < device["totalBytes"]
