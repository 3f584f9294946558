"""The management API over HTTP: the main job, idempotency, watching, cancelling, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from testkit.api.installations import Installation, Start, wait_for


def code(reply: httpx.Response) -> tuple[int, str]:
    error = reply.json()["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert error["message"]
    return reply.status_code, error["code"]


def test_a_model_is_registered_deployed_asked_undeployed_and_deleted(fresh: Installation) -> None:
    fresh.up("v1")
    answer = fresh.post("/inference_model", {"model": "v1", "inputText": "to be or", "maxOutputLength": 5})
    assert answer.json() == {
        "model": "v1",
        "outputText": "to be or",
        "finishReason": "stop",
        "inputTokens": 3,
        "outputTokens": 3,
        "format": "chat",
        "note": "",
    }
    models = {m["model"]: m for m in fresh.http.get("/models").json()["models"]}
    assert (models["base"]["variants"], models["v1"]["base"], models["v1"]["rank"]) == (["v1"], "base", 4)
    deployments = {d["model"]: d for d in fresh.http.get("/deployments").json()["deployments"]}
    assert deployments["base"]["plan"]["ranks"][0]["device"] == "cpu:0"
    status = fresh.http.get("/status").json()
    assert status["engines"][0]["variants"] == ["v1"]
    for name in ("v1", "base"):
        assert fresh.end(fresh.http.delete(f"/deployments/{name}"))["phase"] == "Deleted"
        assert fresh.end(fresh.http.delete(f"/models/{name}"))["phase"] == "Deleted"
    assert fresh.records()[:2] == ({}, {})


def test_raw_text_is_answered(served: Installation) -> None:
    reply = served.post("/inference_model", {"model": "base", "inputText": "raw one", "format": "raw"})
    assert (reply.json()["outputText"], reply.json()["format"]) == ("raw one", "raw")
    sent = served.cluster.scripted("base").calls[-1]
    assert (sent["prompt"], sent["max_tokens"]) == ("raw one", 32), "as long as a chat's answer may be"


def test_a_model_without_a_chat_template_completes_the_text_with_a_notice(served: Installation) -> None:
    served.cluster.scripted("base").has_template = False
    answers = {
        format: served.post("/inference_model", {"model": "v1", "inputText": "to be or", **asked})
        for format, asked in {
            "unsaid": {},
            "auto": {"format": "auto"},
            "chat": {"format": "chat"},
            "raw": {"format": "raw"},
        }.items()
    }
    refused = answers.pop("chat")
    assert code(refused) == (400, "no_chat_template")
    assert "leave `format` out" in refused.json()["error"]["message"]
    told = {format: (reply.json()["format"], reply.json()["note"]) for format, reply in answers.items()}
    note = "'v1' has no chat template, so the text was completed without a template"
    assert told == {"unsaid": ("raw", note), "auto": ("raw", note), "raw": ("raw", "")}
    assert {reply.json()["outputText"] for reply in answers.values()} == {"to be or"}
    assert served.counts() == {("v1", "ok"): 3, ("v1", "no_chat_template"): 1}, "a second try is no request"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_without_a_template_is_refused_in_openai_s_shape(served: Installation, stream: bool) -> None:
    served.cluster.scripted("base").has_template = False
    with served.openai() as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="base", messages=[{"role": "user", "content": "hello"}], stream=stream
        )
    assert (refused.value.code, refused.value.param) == ("no_chat_template", "messages")
    assert refused.value.type == "invalid_request_error"
    assert "/v1/completions" in refused.value.message


def test_logs_and_probes_are_answered(served: Installation) -> None:
    assert served.http.get("/deployments/v1/logs", params={"lines": 2}).text == "a line\na line\n"
    assert served.http.get("/healthz").json() == {"status": "ok"}
    wait_for(lambda: served.http.get("/readyz").json()["revision"] == served.repository.revision())
    assert "python_info" in served.http.get("/metrics").text
    assert served.http.get("/metrics/targets").json() == [
        {"targets": ["127.0.0.1:1"], "labels": {"component": "gateway"}}
    ]


# --- idempotency ---------------------------------------------------------------------------------


def test_a_repeated_key_repeats_the_answer(fresh: Installation) -> None:
    body = {"model": "base", "source": str(fresh.files / "base")}
    key = {"Idempotency-Key": "once"}
    first = fresh.post("/register_model", body, headers=key)
    fresh.end(first)
    again = fresh.post("/register_model", body, headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    other = fresh.post("/register_model", {**body, "model": "other"}, headers=key)
    assert code(other) == (409, "idempotency_conflict")
    elsewhere = fresh.post("/deploy_model", {"model": "base"}, headers=key)
    assert code(elsewhere) == (409, "idempotency_conflict")
    assert set(fresh.records()[0]) == {"base"}
    assert code(fresh.post("/register_model", body)) == (409, "already_exists")


def test_a_refused_request_does_not_use_up_its_key(fresh: Installation) -> None:
    key = {"Idempotency-Key": "again"}
    assert code(fresh.post("/deploy_model", {"model": "base"}, headers=key)) == (404, "model_not_found")
    fresh.register("base")
    assert fresh.post("/deploy_model", {"model": "base"}, headers=key).status_code == 202


def test_concurrent_requests_with_one_key_make_one_operation(fresh: Installation) -> None:
    body = {"model": "base", "source": str(fresh.files / "base")}
    with ThreadPoolExecutor(6) as pool:
        replies = list(
            pool.map(
                lambda _: fresh.post("/register_model", body, headers={"Idempotency-Key": "k"}), range(6)
            )
        )
    assert {r.status_code for r in replies} == {202}
    assert len({r.json()["id"] for r in replies}) == 1
    assert len(fresh.records()[2]) == 1


def test_exactly_one_of_concurrent_registrations_is_accepted(fresh: Installation) -> None:
    body = {"model": "base", "source": str(fresh.files / "base")}
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: fresh.post("/register_model", body), range(6)))
    assert sorted(r.status_code for r in replies) == [202, *[409] * 5]


def test_an_unusable_idempotency_key_is_refused(fresh: Installation) -> None:
    body = {"model": "base", "source": str(fresh.files / "base")}
    for key in ("", "with space", "x" * 201, "tab\there"):
        reply = fresh.post("/register_model", body, headers={"Idempotency-Key": key})
        assert code(reply) == (400, "invalid_request"), key
    assert fresh.records()[0] == {}


# --- watching and cancelling ---------------------------------------------------------------------


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def test_an_operation_is_watched_and_cancelled(fresh: Installation) -> None:
    fresh.register("base")
    fresh.cluster.held.add("base")
    accepted = fresh.post("/deploy_model", {"model": "base"}).json()
    with fresh.http.stream("GET", f"/operations/{accepted['id']}/watch") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen: list[dict[str, Any]] = []
        for event in events(stream.iter_lines()):
            if event["phase"] == "Deploying" and not any(e["phase"] == "Deploying" for e in seen):
                reply = fresh.post(f"/operations/{accepted['id']}/cancel")
                assert reply.status_code == 200
            seen.append(event)
    assert [e["done"] for e in seen] == [*[False] * (len(seen) - 1), True]
    assert seen[-1]["phase"] == "Cancelled"
    assert fresh.http.get("/deployments").json() == {"deployments": []}
    ended = fresh.post(f"/operations/{accepted['id']}/cancel")  # cancelling what ended changes nothing
    assert ended.json()["phase"] == "Cancelled"


def test_a_failure_shows_everywhere(fresh: Installation) -> None:
    fresh.register("base")
    fresh.cluster.broken.add("base")
    accepted = fresh.post("/deploy_model", {"model": "base"})
    ended = fresh.end(accepted)
    assert (ended["phase"], ended["error"]["error"]["code"]) == ("Failed", "engine_failed")
    assert "out of memory" in ended["reason"]
    assert code(fresh.http.get("/deployments/base")) == (404, "not_deployed")
    listed = fresh.http.get("/operations").json()["operations"]
    assert ended in listed


# --- refusals ------------------------------------------------------------------------------------

DEEP = b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}"
BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/register_model", {"model": "base", "source": "/x"}, 409, "already_exists"),
    ("POST", "/register_model", {"model": "x"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": "x", "source": "/x", "base": "base"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": "x", "base": "x", "adapter": "/x"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": "x", "base": "none", "adapter": "/x"}, 404, "model_not_found"),
    ("POST", "/register_model", {"model": "x", "base": "v1", "adapter": "/x"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": "a:b", "source": "/x"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": "../x", "source": "/x"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": 7, "source": "/x"}, 400, "invalid_request"),
    ("POST", "/register_model", {"model": "x", "source": "/x", "sauce": 1}, 400, "invalid_request"),
    ("POST", "/register_model", b'{"model": "x", "source": "/\\ud800"}', 400, "invalid_request"),
    ("POST", "/register_model", b'{"\\ud800": "x"}', 400, "invalid_request"),
    (
        "POST",
        "/register_model",
        {"model": "x", "source": "/x", "compressionTechnique": {}},
        400,
        "invalid_request",
    ),
    (
        "POST",
        "/register_model",
        b'{"model": "x", "source": "/x", "compressionTechnique": {"none": NaN}}',
        400,
        "invalid_request",
    ),
    ("POST", "/register_model", b"{", 400, "invalid_request"),
    ("POST", "/register_model", b"\xff\xfe", 400, "invalid_request"),
    ("POST", "/register_model", b"[]", 400, "invalid_request"),
    ("POST", "/register_model", b"", 400, "invalid_request"),
    ("POST", "/register_model", DEEP, 400, "invalid_request"),
    ("POST", "/register_model", b'{"model": ' + b"9" * 5000 + b"}", 400, "invalid_request"),
    ("POST", "/register_model", b" " * 20_001, 413, "body_too_large"),
    ("POST", "/deploy_model", {"model": "none"}, 404, "model_not_found"),
    ("POST", "/deploy_model", {"model": "base"}, 409, "already_exists"),
    ("POST", "/deploy_model", {"model": "base", "intent": "fast"}, 400, "invalid_request"),
    ("POST", "/deploy_model", {"model": "base", "intent": "latSLO"}, 400, "invalid_request"),
    ("POST", "/deploy_model", {"model": "base", "maxOutputLength": 0}, 400, "invalid_request"),
    ("POST", "/deploy_model", {"model": "base", "maxOutputLength": "many"}, 400, "invalid_request"),
    ("POST", "/deploy_model", {"model": "base", "SLOs": {"e2e_ms": -1}}, 400, "invalid_request"),
    ("POST", "/deploy_model", {"model": "base", "SLOs": {"speed": 1}}, 400, "invalid_request"),
    ("POST", "/inference_model", {"model": "none", "inputText": "x"}, 404, "model_not_found"),
    ("POST", "/inference_model", {"model": "base", "inputText": ""}, 400, "invalid_request"),
    (
        "POST",
        "/inference_model",
        {"model": "base", "inputText": "x", "maxOutputLength": 0},
        400,
        "invalid_request",
    ),
    ("POST", "/inference_model", {"model": "base", "inputText": "!nonsense"}, 502, "engine_failed"),
    ("POST", "/inference_model", {"model": "base", "inputText": "!raise"}, 502, "engine_failed"),
    (
        "POST",
        "/inference_model",
        {"model": "base", "inputText": "!too long"},
        400,
        "context_length_exceeded",
    ),
    ("DELETE", "/models/none", None, 404, "model_not_found"),
    ("DELETE", "/models/base", None, 409, "in_use"),
    ("DELETE", "/models/v1", None, 409, "in_use"),
    ("DELETE", "/deployments/none", None, 404, "not_deployed"),
    ("DELETE", "/deployments/base", None, 409, "in_use"),
    ("GET", "/models/none", None, 404, "model_not_found"),
    ("GET", "/models/%00", None, 404, "model_not_found"),
    ("GET", "/models/%ff", None, 404, "model_not_found"),
    ("GET", "/models/" + "x" * 201, None, 400, "invalid_request"),
    ("GET", "/deployments/none", None, 404, "not_deployed"),
    ("GET", "/deployments/none/logs", None, 404, "not_deployed"),
    ("GET", "/deployments/base/logs?lines=0", None, 400, "invalid_request"),
    ("GET", "/operations/none", None, 404, "operation_not_found"),
    ("GET", "/operations/none/watch", None, 404, "operation_not_found"),
    ("POST", "/operations/none/cancel", None, 404, "operation_not_found"),
    ("GET", "/nowhere", None, 404, "path_not_found"),
    ("PUT", "/models", None, 405, "method_not_allowed"),
]


def send(served: Installation, method: str, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    return served.http.request(
        method, path, content=content, headers={"content-type": "application/json", **headers}
    )


def test_every_bad_request_has_its_code_and_changes_nothing(served: Installation) -> None:
    before = served.records()
    for method, path, body, status, expected in BAD:
        reply = send(served, method, path, body)
        assert code(reply) == (status, expected), (method, path, str(body)[:80], reply.text)
    assert served.records() == before
    assert served.in_flight() == 0


@pytest.mark.parametrize("path", ["/register_model", "/v1/chat/completions"])
def test_a_body_without_length_is_counted(fresh: Installation, path: str) -> None:
    reply = fresh.http.post(
        path, content=iter([b"{", *[b" " * 1000] * 30]), headers={"content-type": "application/json"}
    )
    assert code(reply) == (413, "body_too_large")
    assert fresh.records() == ({}, {}, {})


REGISTRATIONS: list[tuple[str, str | None, str]] = [
    ("missing", None, "source_unreadable"),
    ("torn", None, "source_unreadable"),
    ("/etc", None, "path_not_allowed"),
    ("../outside", None, "path_not_allowed"),
    ("missing", "base", "source_unreadable"),
    ("shape", "base", "adapter_mismatch"),
    ("rank", "base", "adapter_mismatch"),
    ("modules", "base", "adapter_mismatch"),
]


def test_a_registration_that_fails_leaves_nothing(fresh: Installation) -> None:
    fresh.register("base")
    for folder, base, expected in REGISTRATIONS:
        uri = folder if folder.startswith("/") else str(fresh.files / folder)
        where = {"base": base, "adapter": uri} if base else {"source": uri}
        ended = fresh.end(fresh.post("/register_model", {"model": "x", **where}))
        assert (ended["phase"], ended["error"]["error"]["code"]) == ("Failed", expected), folder
        assert ended["error"]["error"]["param"] == ("adapter" if base else "source")
        assert set(fresh.records()[0]) == {"base"}


@pytest.mark.parametrize("field", ["source", "adapter"])
def test_a_uri_that_cannot_be_read_is_refused_at_once(fresh: Installation, field: str) -> None:
    fresh.register("base")
    where = {"base": "base", "adapter": "http://[::1"} if field == "adapter" else {"source": "http://[::1"}
    reply = fresh.post("/register_model", {"model": "x", **where})
    assert code(reply) == (400, "invalid_request")
    assert reply.json()["error"]["param"] == field
    assert set(fresh.records()[0]) == {"base"}


# --- the key -------------------------------------------------------------------------------------


def test_calls_need_the_api_key(start: Start) -> None:
    keyed = start(api_key="secret")
    assert keyed.http.get("/models").status_code == 200
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        with httpx.Client(base_url=keyed.url) as stranger:
            reply = stranger.get("/models", headers=given)
            assert code(reply) == (401, "unauthorized")
            assert reply.headers["www-authenticate"] == "Bearer"
            body = {"model": "x", "source": str(keyed.files / "base")}
            assert stranger.post("/register_model", json=body, headers=given).status_code == 401
            assert stranger.get("/metrics", headers=given).status_code == 401
            assert stranger.get("/healthz", headers=given).status_code == 200
    assert keyed.records() == ({}, {}, {})


def test_a_watcher_that_leaves_is_forgotten(fresh: Installation) -> None:
    fresh.register("base")
    fresh.cluster.held.add("base")
    accepted = fresh.post("/deploy_model", {"model": "base"}).json()
    with fresh.http.stream("GET", f"/operations/{accepted['id']}/watch") as stream:
        next(stream.iter_lines())
    wait_for(lambda: not fresh.server.server_state.tasks)
