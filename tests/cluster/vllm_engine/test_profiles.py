"""Profiles on a real cluster: measured at registration, estimated from, and resumed after a kill."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from testkit import random_adapters
from testkit.cluster import small_models
from testkit.cluster.clusters import GIVE_UP_S, Cluster, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

BASE, SHALLOW, SECOND = "smol", "shallow", "second"
LORA = random_adapters.RandomLora("of-the-second", rank=4, seed=7)
BUSY = 5.0  # how much slower a shared machine may be at one moment than at another
LOAD = {"batch": 1, "inputTokens": 32, "outputTokens": 32}


def profile(cluster: Cluster, model: str = BASE) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"/models/{model}/profile")
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
    assert len(found["loads"]) == found["plannedLoads"] == 4 + 8  # of the base, with variants
    assert not measuring(cluster)


def test_another_model_of_the_shape_needs_no_measuring(cluster: Cluster, base_folder: Path) -> None:
    before = profile(cluster)
    cluster.perform("POST", "/register_model", {"model": "again", "source": str(base_folder)})
    after = profile(cluster, "again")
    assert [after[name] for name in ("key", "seconds", "loads")] == [
        before[name] for name in ("key", "seconds", "loads")
    ]
    cluster.perform("DELETE", "/models/again")


def test_the_deployment_was_estimated_from_the_profile(cluster: Cluster) -> None:
    assert "from its profile" in cluster.get(f"/deployments/{BASE}")["plan"]["reason"]


def test_an_estimate_is_near_what_was_measured(cluster: Cluster) -> None:
    """Other processes used the cores more or less while the loads of the profile were measured."""
    loads = profile(cluster)["loads"]
    (measured,) = (m for m in loads if (m["batch"], m["inputTokens"], m["variants"]) == (1, 32, []))
    load = {name: measured[name] for name in ("batch", "inputTokens", "outputTokens")}
    found = estimate(cluster, **load)
    assert found["basis"] == "profile"
    print(f"\nTPOT estimated {found['tpotMs']}, measured {measured['tpotMs']:.1f} ms")
    assert found["tpotMs"]["low"] / BUSY < measured["tpotMs"] < found["tpotMs"]["high"] * BUSY
    assert found["concurrency"] > 0
    wrong = cluster.http.post(f"/models/{BASE}/estimate", json={**LOAD, "tensorParallel": 2})
    assert "9 heads cannot be split 2 ways" in wrong.json()["error"]["message"]


def test_the_measured_request_path_is_shown_separately(cluster: Cluster) -> None:
    """Through the proxy of this cluster, while its engine's core slept."""
    found = until(lambda: (e := estimate(cluster))["pathMs"] and e, "the request path")
    print(f"\nTTFT {found['ttftMs']}: path {found['pathMs']}, engine {found['engineTtftMs']}")
    assert not any("the request path" in note for note in found["notes"])
    sum_ms = found["engineTtftMs"]["value"] + found["pathMs"]["value"]
    assert found["ttftMs"]["value"] == pytest.approx(sum_ms)
    eight = estimate(cluster, batch=8)
    assert eight["pathMs"]["value"] >= found["pathMs"]["value"] > 0
    body = {"model": BASE, "prompt": "word " * 8, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = cluster.http.post("/v1/completions", json={**body, "request_id": "mine"}).json()
    assert answer["usage"]["completion_tokens"] == 5  # the engine answers again


@dataclass
class Measured:
    """Two models of other architectures than the base's, registered at once, and what was seen meanwhile.

    The controller was killed after the first load of one of them. `begun` and `first_load` are that model and
    load.
    """

    folders: dict[str, Path]
    begun: str = ""
    first_load: dict[str, Any] = field(default_factory=dict)
    ended: list[dict[str, Any]] = field(default_factory=list)
    most_measuring: int = 0
    most_held: int = 0
    held: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def measured(cluster: Cluster, base_folder: Path, adapters: dict[str, Path]) -> Iterator[Measured]:
    """SHALLOW, of the base's first layers, and SECOND, of another family; both stay for this file's tests."""
    into = adapters["spare"].parent
    shallow = small_models.first_layers(base_folder, into / SHALLOW, 2)
    found = Measured({SHALLOW: shallow, SECOND: small_models.gemma3(base_folder, into / SECOND)})
    bodies = [{"model": name, "source": str(folder)} for name, folder in found.folders.items()]
    operations = [cluster.submit("POST", "/register_model", body) for body in bodies]
    found.begun, found.first_load = until(lambda: looked(cluster, found), "the first load")
    kill_the_controller(cluster)
    while not all(cluster.get(f"/operations/{one}")["done"] for one in operations):
        look(cluster, found)
        time.sleep(0.5)
    found.ended = [cluster.finish(one) for one in operations]
    yield found
    for name in found.folders:
        cluster.perform("DELETE", f"/models/{name}")


def looked(cluster: Cluster, found: Measured) -> tuple[str, dict[str, Any]] | None:
    """The model that is measured first, and its first load."""
    look(cluster, found)
    for name in found.folders:
        reply = cluster.http.get(f"/models/{name}/profile")
        if reply.status_code == 200 and (loads := reply.json()["loads"]):
            return name, loads[0]
    return None


def kill_the_controller(cluster: Cluster) -> None:
    """Returns when the engine that the controller had measured with has ended."""
    (old,) = measuring(cluster)
    cluster.replica("ostinato", "Controller").kill()
    until(lambda: not old.is_running(), "the end of the measuring engine")


def look(cluster: Cluster, found: Measured) -> None:
    found.most_measuring = max(found.most_measuring, len(measuring(cluster)))
    (device,) = cluster.get("/cluster")["nodes"][0]["devices"]
    now = {r["deployment"]: r["bytes"] for r in device["reservations"] if "measuring:" in r["deployment"]}
    found.most_held = max(found.most_held, len(now))
    found.held |= now
    for use in device["uses"]:
        if "measuring:" in (use["deployment"] or ""):
            found.taken[use["deployment"]] = max(use["bytes"], found.taken.get(use["deployment"], 0))


def test_two_architectures_are_measured_one_after_the_other(cluster: Cluster, measured: Measured) -> None:
    """Registered at once. Each holds its memory while its engine runs, which the node knows for its own."""
    found = [profile(cluster, name) for name in measured.folders]
    print(f"\nheld {measured.held}, taken at most {measured.taken}: {[one['reason'] for one in found]}")
    assert measured.most_measuring <= 1
    assert measured.most_held <= 1
    assert set(measured.held) == {f"measuring:{one['key']}" for one in found} == set(measured.taken)
    assert all(len(one["loads"]) == one["plannedLoads"] for one in found)
    waited = [
        any("waits until the architecture of" in e["message"] for e in one["events"])
        for one in measured.ended
    ]
    assert sorted(waited) == [False, True]


def test_a_model_of_another_family_is_profiled_estimated_deployed_and_answers(
    cluster: Cluster, measured: Measured
) -> None:
    """A stand-in for Gemma in test_second_model.py, which `make test-long` runs; here with few random
    weights."""
    assert [one["phase"] for one in measured.ended] == ["Ready", "Ready"]
    found = profile(cluster, SECOND)
    assert found["phase"] == "Ready"
    assert len(found["loads"]) == found["plannedLoads"] == 4 + 8  # of itself, with variants
    load = {"batch": 1, "inputTokens": 16, "outputTokens": 16}
    estimate = cluster.http.post(f"/models/{SECOND}/estimate", json=load).json()
    assert estimate["basis"] == "profile"
    assert 0 < estimate["tpotMs"]["low"] <= estimate["tpotMs"]["high"]
    cluster.perform("POST", "/deploy_model", {"model": SECOND, "maxOutputLength": 32})
    try:
        body = {"model": SECOND, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        asked = {**body, "ignore_eos": True, "return_token_ids": True}
        answer = cluster.http.post("/v1/completions", json=asked, timeout=GIVE_UP_S).json()
        prompt, tokens = (answer["choices"][0][key] for key in ("prompt_token_ids", "token_ids"))
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert len(tokens) == 16
        assert (
            random_adapters.falls_short(
                random_adapters.merged_model(measured.folders[SECOND], None), prompt, tokens
            )
            < 1e-4
        )
        a_variant_answers(cluster, measured.folders[SECOND], asked)
        completes_what_it_is_given(cluster, SECOND)
    finally:
        cluster.perform("DELETE", f"/deployments/{SECOND}")


def a_variant_answers(cluster: Cluster, base: Path, asked: dict[str, Any]) -> None:
    """An adapter of the second model, as its merged weights do."""
    adapter = random_adapters.write(base, base.parent / LORA.name, LORA)
    cluster.serve_variant(LORA.name, SECOND, adapter, 32)
    body = {**asked, "model": LORA.name}
    answer = cluster.http.post("/v1/completions", json=body, timeout=GIVE_UP_S).json()
    prompt, tokens = (answer["choices"][0][key] for key in ("prompt_token_ids", "token_ids"))
    assert random_adapters.falls_short(random_adapters.merged_model(base, adapter), prompt, tokens) < 1e-4
    assert random_adapters.falls_short(random_adapters.merged_model(base, None), prompt, tokens) > 1e-2
    for calls in ("deployments", "models"):
        cluster.perform("DELETE", f"/{calls}/{LORA.name}")


def completes_what_it_is_given(cluster: Cluster, name: str) -> None:
    """The model has no chat template, and reports it."""
    text = {"model": name, "inputText": "The capital of France is", "maxOutputLength": 8, "temperature": 0}
    told, raw = (
        cluster.http.post("/inference_model", json=body, timeout=GIVE_UP_S).json()
        for body in (text, {**text, "format": "raw"})
    )
    assert told["outputText"] == raw["outputText"] != ""
    assert (told["format"], raw["note"]) == ("raw", "")
    assert f"'{name}' has no chat template" in told["note"]
    for stream in (False, True):
        chat = {"model": name, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
        refused = cluster.http.post("/v1/chat/completions", json=chat, timeout=GIVE_UP_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")


def test_a_controller_that_is_killed_leaves_a_profile_that_goes_on(
    cluster: Cluster, measured: Measured
) -> None:
    """No engine is left measuring, and no load is measured twice."""
    assert {each["phase"] for each in measured.ended} == {"Ready"}
    found = profile(cluster, measured.begun)
    assert found["loads"][0] == measured.first_load
    assert len(found["loads"]) == found["plannedLoads"]
    assert not measuring(cluster)


def test_a_profile_that_is_cancelled_ends_its_engine_while_that_starts(
    cluster: Cluster, measured: Measured
) -> None:
    operation = cluster.submit("POST", f"/models/{SHALLOW}/profile", {"again": True})
    until(lambda: measuring(cluster), "the measuring engine")
    cluster.submit("POST", f"/operations/{operation}/cancel")
    until(lambda: not measuring(cluster), "its end")
    until(lambda: profile(cluster, SHALLOW)["phase"] == "Cancelled", "the profile's end")
    assert profile(cluster, SHALLOW)["loads"] == []
    (device,) = cluster.get("/cluster")["nodes"][0]["devices"]
    assert not any("measuring:" in r["deployment"] for r in device["reservations"])
