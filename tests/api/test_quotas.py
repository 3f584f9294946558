"""Tenants' quotas over HTTP: requests and tokens a minute, variants and their bytes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.controller.file_reader import FileReader
from controlplane.state.records import Model
from testkit.api import tenants
from testkit.api.installations import Installation, Start
from testkit.api.tenants import As, code, entry


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock()


def limited(
    start: Start, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, **quota: int
) -> Installation:
    made = tenants.started(start, path, entry("a", "deployer", **quota), entry("b", "deployer", **quota))
    monkeypatch.setattr(made.services.rates, "_clock", clock)
    made.up()
    return made


def test_a_quota_bounds_requests_a_minute(
    start: Start, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = limited(start, tmp_path / "t", clock, monkeypatch, requestsPerMinute=3)
    a, b = As(made, "a"), As(made, "b")
    assert a.complete().status_code == 200
    assert a.ask("POST", "/inference_model", {"model": "base", "inputText": "a"}).status_code == 200
    assert a.ask("POST", "/v1/completions", {"nonsense": 1}).status_code == 400, "it counts, too"
    for answer in (a.complete(), a.ask("POST", "/inference_model", {"model": "base", "inputText": "a"})):
        assert code(answer) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "20"
        assert answer.json()["error"]["details"] == {"reason": "requests_per_minute"}
    assert a.ask("GET", "/v1/models").status_code == 200
    assert b.complete().status_code == 200
    assert made.chat("a").status_code == 200
    clock.now_s += 20
    assert a.complete().status_code == 200
    assert a.complete().status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_a_quota_bounds_tokens_a_minute(
    start: Start, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Charged are the most that a request may cost, and then what it did."""
    made = limited(start, tmp_path / "t", clock, monkeypatch, tokensPerMinute=150)
    a = As(made, "a")
    body: dict[str, Any] = {"model": "base", "prompt": "one two three four", "max_tokens": 20}
    charge = len(json.dumps({**body, "stream": stream}, separators=(",", ":"))) // 4 + 20
    left, answered = 150, 0
    while (answer := a.complete(**{**body, "stream": stream})).status_code == 200:
        assert charge <= left
        answered += 1
        if stream:
            assert '"usage"' not in answer.text, "nobody asked for it"
            left -= 4 + answer.text.count('"text"') - 1  # the last event says why it ended
        else:
            left -= answer.json()["usage"]["total_tokens"]
    assert code(answer) == (429, "rate_limit_exceeded")
    assert answer.json()["error"]["details"] == {"reason": "tokens_per_minute"}
    assert charge > left
    assert answered >= 2
    assert As(made, "b").complete(**body).status_code == 200
    refused = a.ask("POST", "/inference_model", {"model": "base", "inputText": "one " * 8})
    assert code(refused) == (429, "rate_limit_exceeded")
    clock.now_s += int(answer.headers["retry-after"])
    assert a.complete(**{**body, "stream": stream}).status_code == 200


def test_a_request_that_no_engine_worked_at_costs_no_tokens(
    start: Start, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = limited(start, tmp_path / "t", clock, monkeypatch, tokensPerMinute=60)
    for _ in range(5):
        assert code(As(made, "a").complete(prompt="!too long", max_tokens=30)) == (
            400,
            "context_length_exceeded",
        )


def test_a_quota_bounds_a_tenant_s_variants(start: Start, tmp_path: Path) -> None:
    made = tenants.started(
        start, tmp_path / "t", entry("a", "deployer", maxVariants=1), entry("b", "deployer")
    )
    made.register("base")
    made.register("shared", "base", folder="v2")
    a, b = As(made, "a"), As(made, "b")
    assert b.register("of-b")["phase"] == "Ready"
    assert a.register("one")["phase"] == "Ready"
    body = {"model": "two", "base": "base", "adapter": str(made.files / "v2")}
    refused = a.ask("POST", "/register_model", body)
    assert code(refused) == (403, "quota_exceeded")
    assert "may have at most 1 variants and has 1" in refused.text
    assert a.register("own", base="", folder="other")["phase"] == "Ready", "a base is no variant"
    assert a.ask("DELETE", "/models/one").status_code == 200
    assert a.register("two", folder="v2")["phase"] == "Ready"


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Files are read while it is set."""
    may, read = threading.Event(), FileReader.read
    may.set()

    async def read_then(*args: Any) -> Model:
        await asyncio.to_thread(may.wait)
        return await read(*args)

    monkeypatch.setattr(FileReader, "read", read_then)
    yield may
    may.set()


def test_a_quota_bounds_the_bytes_of_a_tenant_s_variants(
    start: Start, tmp_path: Path, reading: threading.Event
) -> None:
    path = tmp_path / "t"
    made = tenants.started(start, path, entry("a", "deployer"))
    made.register("base")
    made.register("shared", "base", folder="v1")
    size = made.http.get("/models/shared").json()["weightBytes"]
    tenants.write(path, entry("a", "deployer", maxHostBytes=2 * size))
    made.services.tenants.refresh()
    a = As(made, "a")
    assert a.register("one")["phase"] == "Ready"
    bodies = [{"model": f"more-{n}", "base": "base", "adapter": str(made.files / "v2")} for n in range(3)]
    reading.clear()  # so they are read together
    accepted = [a.ask("POST", "/register_model", body) for body in bodies]
    reading.set()
    ends = [a.end(each) for each in accepted]
    failed = [end for end in ends if end["phase"] == "Failed"]
    assert sorted(end["phase"] for end in ends) == ["Failed", "Failed", "Ready"]
    assert {end["error"]["error"]["code"] for end in failed} == {"quota_exceeded"}
    assert len(a.ask("GET", "/models").json()["models"]) == 4  # base, shared, and two of its own
    refused = a.ask("POST", "/register_model", bodies[0] | {"model": "late"})
    assert code(refused) == (403, "quota_exceeded")
    assert made.register("of-the-installation", "base", folder="v2")["phase"] == "Ready"


def test_a_quota_bounds_a_tenant_s_bases(start: Start, tmp_path: Path) -> None:
    made = tenants.started(start, tmp_path / "t", entry("a", "deployer", maxBases=1), entry("b", "deployer"))
    a, b = As(made, "a"), As(made, "b")
    assert b.register("of-b", base="", folder="base")["phase"] == "Ready"
    assert a.register("one", base="", folder="base")["phase"] == "Ready"
    body = {"model": "two", "source": str(made.files / "other")}
    refused = a.ask("POST", "/register_model", body)
    assert code(refused) == (403, "quota_exceeded")
    assert "may have at most 1 bases and has 1" in refused.text
    assert a.register("v", base="one")["phase"] == "Ready", "a variant is no base"
    assert b.register("more-of-b", base="", folder="other")["phase"] == "Ready"


def test_a_quota_bounds_a_tenant_s_engines(start: Start, tmp_path: Path) -> None:
    """Those that its bases may grow to, now and by a change."""
    made = tenants.started(start, tmp_path / "t", entry("a", "deployer", maxEngines=2))
    a = As(made, "a")
    for name in ("base", "other"):
        assert a.register(name, base="", folder=name)["phase"] == "Ready"

    def deploy(name: str, **replicas: int) -> Any:
        body = {"model": name, "maxOutputLength": 32, "replicas": replicas}
        return a.ask("POST", "/deploy_model", body)

    refused = deploy("base", min=30, max=30)
    assert code(refused) == (403, "quota_exceeded")
    assert "may have at most 2 engines together, but with this deployment they could have 30" in refused.text
    assert code(deploy("base", max=3)) == (403, "quota_exceeded")
    assert a.end(deploy("base", max=1))["phase"] == "Deployed"
    where = "/deployments/base"
    assert code(a.ask("PATCH", where, {"replicas": {"max": 3}})) == (403, "quota_exceeded")
    assert a.ask("PATCH", where, {"replicas": {"max": 2}}).status_code == 200
    assert code(deploy("other", min=0, max=1)) == (403, "quota_exceeded")
    assert a.ask("PATCH", where, {"replicas": {"max": 1}}).status_code == 200
    assert a.end(deploy("other", max=1))["phase"] == "Deployed"
    assert made.http.patch(where, json={"replicas": {"max": 5}}).status_code == 200, (
        "an admin's is not bounded"
    )
    assert a.ask("PATCH", where, {"replicas": {"max": 4}}).status_code == 200, "what is there may be lowered"


@pytest.mark.parametrize("what", ["bases", "variants", "engines"])
def test_a_gateway_s_decision_counts_the_other_gateway_s_commit(
    start: Start, tmp_path: Path, what: str
) -> None:
    """Neither had seen the other's change when it decided first."""
    quota = {"bases": {"maxBases": 1}, "variants": {"maxVariants": 1}, "engines": {"maxEngines": 1}}[what]
    one = tenants.started(start, tmp_path / "t", entry("a", "deployer", **quota), entry("chief", "admin"))
    here = As(one, "a")
    if what != "bases":
        for name in ("base", "other"):
            # Two bases: a registration of a variant writes its base's record, which would be a conflict.
            owner = As(one, "chief") if what == "variants" else here
            assert owner.register(name, base="", folder=name)["phase"] == "Ready"
    two = Installation(one.settings, one.files, one.cluster)
    there = As(two, "a")
    requests: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "bases": (
            "/register_model",
            [{"model": name, "source": str(one.files / name)} for name in ("base", "other")],
        ),
        "variants": (
            "/register_model",
            [
                {"model": f"of-{name}", "base": name, "adapter": str(one.files / "v1")}
                for name in ("base", "other")
            ],
        ),
        "engines": ("/deploy_model", [{"model": name} for name in ("base", "other")]),
    }
    path, (mine, theirs) = requests[what]
    answers: list[Any] = []
    commit = one.repository.commit

    def after_the_other(changes: Any) -> int:
        if not answers:
            answers.append(there.ask("POST", path, theirs))
        return commit(changes)

    with two.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.repository, "commit", after_the_other)
        assert code(here.ask("POST", path, mine)) == (403, "quota_exceeded")
    assert answers[0].status_code == 202
