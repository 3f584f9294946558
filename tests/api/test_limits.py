"""Limits for strangers, browsers and careless clients at a gateway, over real connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from controlplane import errors
from controlplane.api import operations
from controlplane.api.request_bounds import Bounds
from controlplane.api.request_limits import RequestLimits
from controlplane.gateway.route_book import RouteBook
from controlplane.planning import reconcile
from controlplane.state.base import Write
from controlplane.state.records import Operation, OperationKind, Phase
from controlplane.state.repository import Put, Repository
from testkit.api.installations import Installation, wait_for

Start = Callable[..., Installation]
WAIT_S = 60


def code(reply: httpx.Response) -> tuple[int, str, str | None]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"]


def ask(to: Installation, **body: Any) -> httpx.Response:
    return to.post("/v1/completions", {"model": "base", "max_tokens": 2, **body})


# --- bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/register_model"])
@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_missing_body_ends_its_connection(start: Start, path: str, framing: str) -> None:
    installation = start(limits=RequestLimits(body_timeout_s=0.2))
    where = urlsplit(installation.url)
    with socket.create_connection((where.hostname, where.port), WAIT_S) as connection:
        half = b"{" if framing.startswith("Content") else b"1\r\n{\r\n"
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n".encode() + half)
        reply = b""
        while piece := connection.recv(4096):  # until it is closed
            reply += piece
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "body_too_slow"
    assert installation.http.get("/healthz").status_code == 200


def test_a_body_that_comes_in_pieces_within_the_limit_is_read(served: Installation) -> None:
    body = json.dumps({"model": "base", "prompt": "a b", "max_tokens": 4}).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    headers = {"content-type": "application/json"}
    assert served.http.post("/v1/completions", content=pieces(), headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/register_model", "/plan"])
def test_a_body_of_many_parts_is_refused_unread(start: Start, path: str) -> None:
    """4 MiB of keys occupied a gateway for half a second, in which it answered no client."""
    installation = start(limits=RequestLimits(body_parts=1024))
    keys = {f"key{number}": 1 for number in range(3_000)}
    refused = installation.post(path, {"model": "base", "prompt": "a", "x": keys})
    assert code(refused)[:2] == (400, "invalid_request")
    assert "at most 1024" in refused.text
    deep = installation.http.post(path, content=b"[" * 20_000)
    assert code(deep)[:2] == (400, "invalid_request")


def test_large_bodies_are_counted_by_tenant(start: Start) -> None:
    installation = start(large_body_bytes=1 << 20)
    installation.up()
    body = {"model": "base", "prompt": "a" * (300 << 10), "max_tokens": 1}
    statuses = [installation.post("/v1/completions", body).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    refused = installation.post("/v1/completions", body)
    assert refused.json()["error"]["details"] == {"reason": "bytes_of_large_bodies_per_minute"}
    assert int(refused.headers["retry-after"]) > 0
    assert ask(installation, prompt="small ones pass").status_code == 200


# --- answers of one request ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 5}, "n"),
        ({"prompt": "a", "n": 10**9}, "n"),
        ({"prompt": "a", "n": "1000"}, "n"),
        ({"prompt": "a", "n": 1000.0}, "n"),
        ({"prompt": ["a", "b", "c"], "n": 2}, "n"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": [[1], [2], [3], [4], [5]]}, "prompt"),
    ],
)
def test_more_answers_than_a_request_may_ask_for(start: Start, body: dict[str, Any], param: str) -> None:
    installation = start(limits=RequestLimits(bounds=Bounds(sequences=4)))
    installation.up()
    assert code(ask(installation, **body)) == (400, "invalid_request", param)
    for fine in ({"prompt": "a", "n": 4}, {"prompt": ["a", "b"], "n": 2}, {"prompt": [1, 2, 3, 4, 5]}):
        assert ask(installation, **fine).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": ["x"] * 9}, "stop"),
        ({"bad_words": ["x"] * 9}, "bad_words"),
        ({"logit_bias": {str(token): 1 for token in range(9)}}, "logit_bias"),
        ({"allowed_token_ids": list(range(9))}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a" * 2_000}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a" * 100] * 20}}, "structured_outputs"),
        ({"logprob_token_ids": list(range(9)), "logprobs": 1}, "logprob_token_ids"),
        ({"response_format": {"type": "json_schema", "json_schema": {"x": "a" * 2_000}}}, "response_format"),
        ({"structured_outputs": {"json": {"enum": ["a" * 100] * 20}}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"x": json.loads("[" * 40 + "]" * 40)}}}, "structured_outputs"),
    ],
)
def test_fields_that_cost_the_engine_work_for_each_token_are_bounded(
    start: Start, body: dict[str, Any], param: str
) -> None:
    """The engine looks for each of ten thousand stop sequences after each token, which delays all answers."""
    installation = start(limits=RequestLimits(bounds=Bounds(words=8, grammar_bytes=1_000)))
    installation.up()
    refused = ask(installation, prompt="a", **body)
    assert code(refused) == (400, "invalid_request", param)
    assert "expected" in refused.text or "at most" in refused.text
    fine: list[dict[str, Any]] = [
        {"stop": ["x"] * 8},
        {"stop": "x" * 100},
        {"structured_outputs": {"regex": "a" * 100}},
    ]
    for each in fine:
        assert ask(installation, prompt="a", **each).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": list(range(34)), "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": [list(range(17)), list(range(17))], "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": "word " * 28, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": ["word " * 14] * 2, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": list(range(101)), "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": list(range(17)), "prompt_logprobs": 2, "n": 2}, "prompt_logprobs"),
        ({"prompt": list(range(34)), "echo": True, "logprobs": 2}, "logprobs"),
    ],
)
def test_log_probabilities_of_all_of_a_prompt_are_bounded(
    start: Start, body: dict[str, Any], param: str
) -> None:
    """An engine's server writes them in one go, and a prompt of 415 tokens with 20 of each held up everybody
    else for a tenth of a second (benchmarks/results/hardening.json)."""
    installation = start(limits=RequestLimits(bounds=Bounds(prompt_logprobs=100)))
    installation.up()
    refused = ask(installation, **body)
    assert code(refused) == (400, "invalid_request", param)
    assert "at most 100" in refused.text
    fine: list[dict[str, Any]] = [
        {"prompt": list(range(33)), "prompt_logprobs": 2},
        {"prompt": "word " * 25, "prompt_logprobs": 2},
        {"prompt": list(range(60)), "logprobs": 20},  # of the answer's tokens
        {"prompt": list(range(60)), "prompt_logprobs": None, "echo": True},
    ]
    for each in fine:
        assert ask(installation, **each).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "prompt": None}, "prompt_logprobs"),
        ({"echo": True, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
    ],
)
def test_parts_of_messages_are_bounded_in_any_position(
    start: Start, body: dict[str, Any], param: str
) -> None:
    installation = start(limits=RequestLimits(bounds=Bounds(prompt_logprobs=1_000)))
    installation.up()

    def chat(words: int, **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "word " * words}]
        return installation.post("/v1/chat/completions", {"model": "base", "messages": messages, **more})

    assert code(chat(60, **body)) == (400, "invalid_request", param)
    tools = [{"type": "function", "function": {"name": "x", "description": "word " * 60}}]
    assert code(chat(1, **body, tools=tools)) == (400, "invalid_request", param)
    assert code(chat(2_000, echo=True)) == (400, "invalid_request", "top_logprobs")
    assert chat(60, prompt_logprobs=2).status_code == 200


def test_tools_are_compiled_when_one_must_be_called(start: Start) -> None:
    installation = start(limits=RequestLimits(bounds=Bounds(grammar_bytes=1_000)))
    installation.up()
    tools = [{"type": "function", "function": {"name": "x", "description": "a" * 2_000}}]
    asked = {"model": "base", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    refused = installation.post("/v1/chat/completions", {**asked, "tool_choice": "required"})
    assert code(refused) == (400, "invalid_request", "tools")
    assert installation.post("/v1/chat/completions", {**asked, "tool_choice": "auto"}).status_code == 200


# --- browsers ------------------------------------------------------------------------------------------


def test_without_a_key_only_names_of_this_machine_are_accepted(served: Installation) -> None:
    port = urlsplit(served.url).port
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST"):
        assert served.http.get("/models", headers={"host": host}).status_code == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "[::2]",
        "127.0.0.1.nip.io",
    ):
        refused = served.http.get("/models", headers={"host": host})
        assert code(refused) == (403, "host_not_allowed", None)
        assert ask_as(served, {"host": host}).status_code == 403
    assert served.http.get("/healthz", headers={"host": "10.1.2.3"}).status_code == 200  # a kubelet's


def test_a_page_from_another_origin_may_not_ask(served: Installation) -> None:
    for origin in ("https://evil.example", "null", "http://localhost.evil.example:8000"):
        assert code(ask_as(served, {"origin": origin})) == (403, "host_not_allowed", None)
    assert ask_as(served, {"origin": "http://localhost:3000"}).status_code == 200


def ask_as(to: Installation, headers: dict[str, str]) -> httpx.Response:
    body = {"model": "base", "prompt": "a", "max_tokens": 2}
    return to.http.post("/v1/completions", json=body, headers=headers)


def test_names_can_be_added_and_a_key_opens_all(start: Start) -> None:
    named = start(allowed_hosts="models.example, other.example")
    for host, status in (("models.example:80", 200), ("localhost", 200), ("evil.example", 403)):
        assert named.http.get("/models", headers={"host": host}).status_code == status


def test_with_a_key_any_host_name_is_accepted(start: Start) -> None:
    keyed = start(api_key="secret")
    assert keyed.http.get("/models", headers={"host": "models.example"}).status_code == 200


# --- the store -----------------------------------------------------------------------------------------


def test_gateways_stay_ready_and_answer_without_the_store(
    served: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: served.http.get("/readyz").json()["revision"] == served.repository.revision())

    def away(*given: Any) -> Any:
        raise errors.Unavailable("the state store does not answer")

    for name in ("revision", "snapshot", "changes", "get"):
        monkeypatch.setattr(served.store, name, away)
    assert served.http.get("/readyz").status_code == 200
    assert {card["id"] for card in served.http.get("/v1/models").json()["data"]} == {"base", "v1"}
    assert served.http.get("/v1/models/v1").json()["parent"] == "base"
    assert ask(served, prompt="a b").status_code == 200
    assert served.http.get("/models").status_code == 503


def test_a_gateway_that_never_read_the_store_is_not_ready(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(book: RouteBook) -> Any:
        raise errors.Unavailable("the state store does not answer")

    monkeypatch.setattr(RouteBook, "refresh", away)
    assert start().http.get("/readyz").status_code == 503


def test_more_watchers_than_a_gateway_has_places_for(
    fresh: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.repository.commit([Put(Operation("op-1", OperationKind.REGISTER, "x", Phase.PENDING), 0)])
    monkeypatch.setattr(operations, "MAX_WATCHERS", 1)
    with fresh.http.stream("GET", "/operations/op-1/watch") as first:
        assert first.status_code == 200
        wait_for(lambda: fresh.services.routes.operations.waiting == 1)
        refused = fresh.http.get("/operations/op-1/watch")
        assert code(refused) == (429, "overloaded", None)
        assert refused.headers["retry-after"]
    wait_for(lambda: fresh.services.routes.operations.waiting == 0)
    assert fresh.http.get("/operations/none/watch").status_code == 404


async def test_a_watcher_of_an_operation_does_not_read_the_store(
    fresh: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = Operation("op-1", OperationKind.REGISTER, "x", Phase.PENDING)
    fresh.repository.commit([Put(operation, 0)])
    own = Repository(fresh.store)
    book = RouteBook(own)
    found = own.get(Operation, "op-1")
    assert found is not None
    watching = operations.watch(replace(fresh.services, repository=own, routes=book), found)
    assert b"op-1" in await anext(watching)
    monkeypatch.setattr(operations, "KEEP_ALIVE_S", 0.001)
    await book.refresh()
    monkeypatch.setattr(own, "read", None)  # for each watcher, ten times a second
    assert await anext(watching) == b": still running\n\n"
    monkeypatch.undo()
    ended = Operation("op-1", OperationKind.REGISTER, "x", Phase.READY)
    fresh.repository.commit([Put(ended, found.version)])
    await book.refresh()
    assert b"Ready" in await anext(watching)
    with pytest.raises(StopAsyncIteration):
        await anext(watching)


def test_a_retry_is_answered_when_its_operation_is_forgotten(
    fresh: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "base", "source": str(fresh.files / "base")}
    key = {"idempotency-key": "once"}
    first = fresh.end(fresh.post("/register_model", body, headers=key))
    monkeypatch.setattr(reconcile, "KEEP_OPERATIONS", 0)
    wait_for(lambda: fresh.http.get(f"/operations/{first['id']}").status_code == 404)
    again = fresh.post("/register_model", body, headers=key)
    assert again.status_code in (200, 202)
    assert {k: again.json()[k] for k in ("id", "phase", "done")} == {
        k: first[k] for k in ("id", "phase", "done")
    }
    other = fresh.post("/register_model", {**body, "model": "other"}, headers=key)
    assert code(other)[:2] == (409, "idempotency_conflict")


def test_an_unreadable_record_stops_no_engine_and_no_traffic(
    served: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that was rolled back may have written such a record."""
    wait_for(lambda: "v1" in served.services.routes.table.routes)  # what a gateway never saw, it cannot keep
    observed: list[int] = []
    observe = served.cluster.observe

    async def counted() -> Any:
        observed.append(served.store.revision())
        return await observe()

    monkeypatch.setattr(served.cluster, "observe", counted)
    before = served.store.get("deployment", "base")
    assert before is not None
    engines = dict(served.cluster.engines)
    written = before.value.replace('"Deployed"', '"Hibernated"', 1)
    assert written != before.value
    served.store.commit([Write("deployment", "base", written, before.version)])
    wait_for(lambda: "deployment/base" in served.repository.read().undecodable)
    revision = served.repository.revision()
    wait_for(lambda: served.services.routes.table.revision >= revision)
    wait_for(lambda: observed.count(revision) > 3)  # the controller had time to act on it
    assert served.cluster.engines == engines
    for name in ("base", "v1", "base:v1"):
        assert ask(served, model=name, prompt="a").status_code == 200
    now = served.store.get("deployment", "base")
    assert now is not None
    served.store.commit([Write("deployment", "base", before.value, now.version)])
    wait_for(lambda: not served.repository.read().undecodable)
    assert served.http.get("/deployments/v1").json()["phase"] == "Deployed"
