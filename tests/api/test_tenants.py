"""The tenant of a request, by its key; and refusals and lateness as clients see them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from controlplane import errors
from controlplane.state.terms import Priority
from controlplane.traffic.tenants import DEFAULT, Tenant
from testkit.api.installations import Installation, Start, wait_for

KEYS = {"admin": DEFAULT, "key-a": Tenant("a", 2.0, 3, Priority.NORMAL), "key-b": Tenant("b")}
BODY = {"model": "base", "prompt": "a b"}


@pytest.fixture
def shared(start: Start, tmp_path: Path) -> Installation:
    """Two tenants and an installation's key."""
    listed = [
        {
            "name": "a",
            "keys": [sha256(b"key-a").hexdigest()],
            "weight": 2,
            "maxWaiting": 3,
            "maxPriority": "normal",
        },
        {"name": "b", "keys": [sha256(b"key-b").hexdigest()]},
    ]
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": listed}))
    made = start(api_key="admin", tenants=str(path))
    made.up()
    return made


def ask(installation: Installation, key: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    body = {"model": "base", "inputText": "a b"} if path == "/inference_model" else BODY
    headers = {"Authorization": f"Bearer {key}", **more}
    return installation.post(path, body, headers=headers)


def counted(installation: Installation, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(value for label, value in sorted(s.labels.items()) if label != "model"): s.value
        for metric in installation.registry.collect()
        for s in metric.samples
        if s.name == name
    }


def test_a_key_names_the_tenant_and_permits_only_inference(shared: Installation) -> None:
    for key, tenant in KEYS.items():
        for path in ("/v1/completions", "/inference_model"):
            assert ask(shared, key, path).status_code == 200
            assert shared.cluster.heard.tenant == tenant
        headers = {"Authorization": f"Bearer {key}"}
        assert shared.http.get("/v1/models", headers=headers).status_code == 200
        for method, path in (("GET", "/status"), ("POST", "/deploy_model"), ("DELETE", "/models/base")):
            status = shared.http.request(method, path, headers=headers, json={}).status_code
            assert (status == 403) is (key != "admin")
    for key in ("none", "key-c", sha256(b"key-a").hexdigest()):
        reply = ask(shared, key)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthorized")
    assert shared.http.get("/healthz", headers={"Authorization": "Bearer none"}).status_code == 200


def test_a_tenant_gets_no_higher_priority_than_it_may(shared: Installation) -> None:
    refused = ask(shared, "key-a", **{"x-ostinato-priority": "high"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-ostinato-priority")
    assert ask(shared, "key-b", **{"x-ostinato-priority": "high"}).status_code == 200
    assert shared.cluster.heard.priority is Priority.HIGH


def test_a_refusal_has_a_reason_and_a_time_to_retry(shared: Installation) -> None:
    shared.cluster.refusal = errors.Overloaded("full", details={"reason": "full_line"}, retry_after_s=7)
    reply = ask(shared, "key-a", **{"x-ostinato-ttft-ms": "500", "x-ostinato-deadline-ms": "500"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "7")
    assert reply.json()["error"]["details"] == {"reason": "full_line"}
    assert counted(shared, "ostinato_requests_refused_total") == {("full_line",): 1}
    wait_for(lambda: counted(shared, "ostinato_targets_total"))
    assert counted(shared, "ostinato_targets_total") == {("false", "deadline"): 1}


def test_a_late_request_gets_its_error_and_clients_do_not_retry(shared: Installation) -> None:
    """A stream, too: as it may be dropped until then, its status waits for its first token."""
    shared.cluster.refusal = errors.Late("late", details={"reason": "late"})
    terms = {"x-ostinato-ttft-ms": "500", "x-ostinato-late": "drop"}
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="key-a", max_retries=2, timeout=90) as client:
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(model="base", prompt="a", stream=stream, extra_headers=terms)
            assert (caught.value.status_code, caught.value.code) == (504, "late")
    assert counted(shared, "ostinato_requests_dropped_total") == {("late",): 2}
    assert counted(shared, "ostinato_targets_total") == {("false", "ttft"): 1}


def test_streams_that_may_be_dropped_are_whole(shared: Installation) -> None:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="key-a", max_retries=0, timeout=90) as client:
        for late in ("drop", "finish"):
            headers = {"x-ostinato-ttft-ms": "60000", "x-ostinato-late": late}
            chunks = list(
                client.completions.create(model="base", prompt="a", stream=True, extra_headers=headers)
            )
            assert [chunk.choices[0].text for chunk in chunks] == ["a", ""]
    wait_for(lambda: counted(shared, "ostinato_targets_total") == {("true", "ttft"): 2})


def test_a_stream_that_becomes_late_ends_with_an_event(shared: Installation) -> None:
    shared.cluster.refusal = errors.Late("late", details={"reason": "late"})
    headers = {"Authorization": "Bearer key-a"}
    reply = shared.post("/v1/completions", {**BODY, "stream": True}, headers=headers)
    assert reply.status_code == 200
    assert json.loads(reply.text.removeprefix("data: "))["error"]["code"] == "late"
