"""The OpenAI routes over HTTP, with OpenAI's own client; and what happens when engines misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import sysconfig
from typing import Any

import httpx
import openai
import pytest

from controlplane import errors
from controlplane.api.request_limits import RequestLimits
from controlplane.gateway.metrics import UNKNOWN
from controlplane.planning import retrying
from controlplane.planning.retrying import RetryLimits
from controlplane.runtime.path_probe import Probe, probe, streamed
from profiler.errors import CheckpointError
from profiler.request_path import fit
from testkit.api.installations import Installation, Start, wait_for
from testkit.api.tenants import code
from workers.bus.faults import LoadFailed

ASK: list[Any] = [{"role": "user", "content": "one two three"}]


def data(text: str) -> list[Any]:
    """The events of a stream; [DONE] stays text."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# --- OpenAI's client -----------------------------------------------------------------------------


def test_a_chat_is_answered_as_a_whole_and_as_a_stream(standing: Installation) -> None:
    with standing.openai() as client:
        for name in ("base", "v1", "base:v1"):
            reply = client.chat.completions.create(model=name, messages=ASK)
            assert reply.choices[0].message.content == "one two three"
            assert reply.model == name.removeprefix("base:")
            chunks = list(client.chat.completions.create(model=name, messages=ASK, stream=True))
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == "onetwothree"


def test_metrics_do_not_count_probes_of_the_request_path(standing: Installation) -> None:
    names = ("ostinato_requests_total", "ostinato_ttft_seconds_count", "ostinato_request_seconds_count")

    def counted() -> dict[str, float]:
        samples = [s for metric in standing.registry.collect() for s in metric.samples]
        return {
            name: sum(s.value for s in samples if (s.name, s.labels.get("model")) == (name, "base"))
            for name in names
        }

    def ask(request_id: str, stream: bool) -> None:
        body = {"model": "base", "prompt": "a b", "request_id": request_id, "stream": stream}
        assert standing.post("/v1/completions", body).status_code == 200

    wait_for(lambda: standing.in_flight() == 0)
    ask("mine", stream=False)
    before = counted()
    standing.metrics.probe_marker = "marker"
    try:
        for stream in (True, False):
            ask("marker-1", stream)
        ask("mine", stream=True)
        wait_for(lambda: standing.in_flight() == 0)
        assert wait_for(lambda: (now := counted())[names[-1]] > before[names[-1]] and now) == {
            name: count + 1 for name, count in before.items()
        }
    finally:
        standing.metrics.probe_marker = ""


def test_a_probe_sends_what_is_documented_and_its_client_reads_streams(standing: Installation) -> None:
    """docs/profiler.md and docs/operating.md name the number."""

    def answered() -> float:
        return standing.counts().get(("base", "ok"), 0.0)

    wait_for(lambda: standing.in_flight() == 0)
    before = answered()
    asked = Probe(standing.url, "base", "marker", standing.settings.api_key, 64)
    bursts = probe(asked)
    wait_for(lambda: answered() == before + 387)
    assert {burst.batch for burst in bursts} == {1, 8, 32}
    assert len({burst.input_tokens for burst in bursts if burst.batch == 1}) == 2
    path = fit(bursts)
    assert 0 < path.low < 1 < path.high
    assert path.mean_s(32, 16) > 0


def test_a_probe_does_not_take_an_error_for_a_token(served: Installation) -> None:
    async def first_and_last_s(prompt: str) -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=served.url, timeout=90) as http:
            return await streamed(http, {"model": "base", "prompt": prompt, "stream": True})

    first_s, last_s = asyncio.run(first_and_last_s("a b c"))
    assert 0 < first_s <= last_s
    for prompt, told in (("!break", "engine_failed"), ("!too long", "400")):
        with pytest.raises(RuntimeError, match=told):
            asyncio.run(first_and_last_s(prompt))


def test_completions_are_answered(standing: Installation) -> None:
    with standing.openai() as client:
        assert client.completions.create(model="v1", prompt="a b").choices[0].text == "a b"
        chunks = client.completions.create(model="v1", prompt="a b", stream=True)
        assert [c.choices[0].text for c in chunks] == ["a", "b", ""]


def test_served_models_are_listed(standing: Installation) -> None:
    with standing.openai() as client:
        found = {m.id: m.model_dump() for m in client.models.list()}
        assert {n: (m["parent"], m["root"]) for n, m in found.items()} == {
            "base": (None, "base"),
            "v1": ("base", "base"),
        }
        assert client.models.retrieve("base:v1").id == "v1"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("none")


def test_the_engine_receives_the_request_s_fields(standing: Installation) -> None:
    standing.chat("x", "v1", temperature=0, top_k=5, cache_salt="mine")
    told = standing.cluster.scripted("base").calls[-1]
    assert (told["model"], told["max_completion_tokens"]) == ("v1", 32)
    assert told["top_k"] == 5
    assert told["cache_salt"].endswith(":mine")
    standing.chat("x", "base")
    assert "cache_salt" not in standing.cluster.scripted("base").calls[-1]


def test_a_name_registered_again_gets_another_cache(served: Installation) -> None:
    def salt() -> str:
        served.chat("x", "v1")
        return str(served.cluster.scripted("base").calls[-1]["cache_salt"])

    before = salt()
    served.end(served.http.delete("/deployments/v1"))
    served.end(served.http.delete("/models/v1"))
    served.register("v1", "base", "v2")
    served.deploy("v1")
    assert salt() != before


def test_terms_of_a_request_in_headers_and_body(standing: Installation) -> None:
    terms = {"x-ostinato-ttft-ms": "60000", "x-ostinato-priority": "high", "x-ostinato-session": "s"}
    with standing.openai() as client:
        reply = client.chat.completions.create(
            model="base", messages=ASK, extra_headers=terms, timeout=60, service_tier="priority"
        )
        assert reply.choices[0].message.content == "one two three"
        for name, value in (("x-ostinato-ttft-ms", "soon"), ("x-ostinato-ttft", "5")):
            for stream in (True, False):
                with pytest.raises(openai.BadRequestError) as refusal:
                    client.chat.completions.create(
                        model="base", messages=ASK, stream=stream, extra_headers={name: value}
                    )
                assert (refusal.value.param, refusal.value.code) == (name, "invalid_request")
    asked = {"model": "base", "inputText": "x"}
    reply_ours = standing.post("/inference_model", asked, headers={"x-ostinato-late": "soon"})
    assert code(reply_ours) == (400, "invalid_request")


def test_a_priority_in_the_body_is_not_for_the_engine(standing: Installation) -> None:
    standing.chat("x", "base", priority=-1, service_tier="flex")
    told = standing.cluster.scripted("base").calls[-1]
    assert "priority" not in told
    assert told["service_tier"] == "flex"


# --- vLLM's adapter routes -----------------------------------------------------------------------


def test_loading_and_unloading_an_adapter(served: Installation) -> None:
    load = {"lora_name": "v2", "lora_path": str(served.files / "v2")}
    reply = served.post("/v1/load_lora_adapter", load)
    assert (reply.status_code, "added" in reply.text) == (200, True)
    assert served.chat("hello", "v2").status_code == 200
    assert code(served.post("/v1/load_lora_adapter", load)) == (409, "already_exists")
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "v2"}).status_code == 200
    assert code(served.post("/v1/unload_lora_adapter", {"lora_name": "v2"})) == (404, "model_not_found")
    assert code(served.post("/v1/unload_lora_adapter", {"lora_name": "base"})) == (404, "model_not_found")
    assert code(served.chat("hello", "v2")) == (404, "model_not_found")


def test_an_adapter_that_does_not_load_leaves_nothing(served: Installation) -> None:
    served.cluster.refused.add("v2")
    before = served.records()[:2]
    for name, path, expected in [
        ("v2", str(served.files / "v2"), (422, "adapter_mismatch")),  # the engine refuses it
        ("x", str(served.files / "shape"), (422, "adapter_mismatch")),
        ("x", str(served.files / "missing"), (400, "source_unreadable")),
        ("x", "/etc", (403, "path_not_allowed")),
        ("x", "", (400, "invalid_request")),
        ("base", str(served.files / "v2"), (400, "invalid_request")),
    ]:
        reply = served.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        assert code(reply) == expected, reply.text
        assert served.records()[:2] == before


@pytest.mark.parametrize(
    ("fault", "expected", "words"),
    [
        (CheckpointError("layer-00000.safetensors is corrupt"), (400, "source_unreadable"), "layer-00000"),
        (ValueError("it needs 9 bytes, 4 are set aside"), (422, "adapter_mismatch"), "needs 9 bytes"),
        (LoadFailed("out of memory"), (502, "engine_failed"), "5 attempts within"),
        (errors.Unavailable("it is not there"), (503, "unavailable"), "5 attempts within"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_answered_with_the_reason(
    served: Installation,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    expected: tuple[int, str],
    words: str,
) -> None:
    monkeypatch.setattr(retrying, "LOADING", RetryLimits(first_pause_s=0.01))
    served.cluster.faults["v2"] = fault
    before = served.records()[:2]
    load = {"lora_name": "v2", "lora_path": str(served.files / "v2")}
    reply = served.post("/v1/load_lora_adapter", load)
    assert code(reply) == expected
    assert words in reply.json()["error"]["message"]
    assert served.records()[:2] == before
    assert served.chat("hello", "v1").status_code == 200
    served.cluster.faults.clear()
    assert served.post("/v1/load_lora_adapter", load).status_code == 200


def test_a_failed_deployment_shows_its_reason_in_every_view(served: Installation) -> None:
    served.cluster.faults["v2"] = CheckpointError("layer-00000.safetensors is corrupt; copy it again")
    assert served.register("v2", "base")["phase"] == "Ready"
    assert served.deploy("v2")["phase"] == "Failed"
    reply = served.http.get("/deployments/v2")
    assert code(reply) == (404, "not_deployed")
    assert "its last deployment failed: layer-00000.safetensors is corrupt; copy it again" in reply.text
    served.cluster.faults.clear()
    assert served.deploy("v2")["phase"] == "Deployed"
    assert served.http.get("/deployments/v2").json()["phase"] == "Deployed"
    assert served.end(served.http.delete("/deployments/v2"))["phase"] == "Deleted"
    assert "failed" not in served.http.get("/deployments/v2").text


def test_an_adapter_names_its_base_unless_one_base_is_deployed(fresh: Installation) -> None:
    load = {"lora_name": "v1", "lora_path": str(fresh.files / "v1")}
    assert code(fresh.post("/v1/load_lora_adapter", load)) == (400, "invalid_request")
    fresh.up()
    fresh.register("other")
    fresh.deploy("other")
    assert code(fresh.post("/v1/load_lora_adapter", load)) == (400, "invalid_request")
    assert fresh.post("/v1/load_lora_adapter", {**load, "base_model_name": "other"}).status_code == 200
    assert fresh.http.get("/models/v1").json()["base"] == "other"


# --- refusals ------------------------------------------------------------------------------------

CHAT = {"model": "base", "messages": ASK}
BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "invalid_request"),
    (b"", 400, "invalid_request"),
    (b"[]", 400, "invalid_request"),
    (b"\xff", 400, "invalid_request"),
    (b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "invalid_request"),
    (b'{"model": ' + b"9" * 5000 + b"}", 400, "invalid_request"),
    (b'{"model": "\\ud800"}', 400, "invalid_request"),
    ({"messages": ASK}, 400, "invalid_request"),
    ({**CHAT, "model": 7}, 400, "invalid_request"),
    ({**CHAT, "model": ""}, 400, "invalid_request"),
    ({**CHAT, "model": "none"}, 404, "model_not_found"),
    ({**CHAT, "model": "v1:base"}, 404, "model_not_found"),
    ({**CHAT, "max_tokens": "33"}, 400, "invalid_request"),
    ({**CHAT, "max_tokens": 33.0}, 400, "invalid_request"),
    (b" " * 20_001, 413, "body_too_large"),
]


def test_every_bad_request_has_its_code(served: Installation) -> None:
    before = served.records()
    for body, status, expected in BAD:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        for path in ("/v1/chat/completions", "/v1/completions"):
            reply = served.http.post(path, content=content)
            assert code(reply) == (status, expected), (str(body)[:80], reply.text)
    assert served.records() == before
    assert served.cluster.scripted("base").calls == []
    assert served.in_flight() == 0


def test_nesting_at_the_edge_is_answered_or_refused(standing: Installation) -> None:
    for depth in range(900, 1000, 5):
        body = b'{"model": "base", "prompt": "x", "deep": %s%s}' % (b"[" * depth, b"]" * depth)
        assert standing.http.post("/v1/completions", content=body).status_code in (200, 400, 502)


def test_not_deployed_and_being_deployed(fresh: Installation) -> None:
    fresh.register("base")
    assert code(fresh.chat("x")) == (404, "not_deployed")
    fresh.cluster.held.add("base")
    fresh.post("/deploy_model", {"model": "base"})
    reply = fresh.chat("x")
    assert code(reply) == (503, "unavailable")
    assert reply.headers["retry-after"] == "5"


# --- engines that misbehave ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "expected"),
    [("!too long", 400, "context_length_exceeded"), ("!raise", 502, "engine_failed")],
)
def test_an_engine_that_refuses_or_fails(
    served: Installation, prompt: str, status: int, expected: str, stream: bool
) -> None:
    assert code(served.chat(prompt, stream=stream)) == (status, expected)
    assert served.counts() == {("base", expected): 1}
    assert served.in_flight() == 0


def test_an_adapter_that_left_its_engine_and_is_refused_there(served: Installation) -> None:
    served.cluster.refused.add("v1")
    for stream in (False, True):
        assert code(served.chat("x", "v1", stream=stream)) == (422, "adapter_mismatch")
    served.cluster.refused.clear()
    served.cluster.faults["v1"] = CheckpointError("adapter_model.safetensors is corrupt; copy it again")
    for stream in (False, True):
        reply = served.chat("x", "v1", stream=stream)
        assert code(reply) == (400, "source_unreadable")
        assert "adapter_model.safetensors is corrupt; copy it again" in reply.text


def test_the_list_of_models_shows_no_folder_of_the_server(served: Installation) -> None:
    """A client that may not manage the installation also gets the reason, and the file's name."""
    folder = served.files / "v1"
    home, packages = served.settings.home, sysconfig.get_path("purelib")
    told = (
        f"cannot read {folder}/adapter_model.safetensors: Permission denied; check its permissions"
        f" (converted in {home}/models/x-1.2, by {packages}/vllm/lora/models.py:12)"
    )
    served.cluster.faults["v1"] = CheckpointError(told)
    wanted = (
        "cannot read adapter_model.safetensors: Permission denied; check its permissions"
        " (converted in x-1.2, by models.py:12)"
    )
    replies = [served.chat("x", "v1", stream=stream) for stream in (False, True)]
    replies.append(served.post("/inference_model", {"model": "v1", "inputText": "x"}))
    for reply in replies:
        assert code(reply) == (400, "source_unreadable")
        assert reply.json()["error"]["message"] == wanted


def test_a_stream_that_breaks_ends_with_an_error_event(served: Installation) -> None:
    events = data(served.chat("!break", stream=True).text)
    assert events[0]["choices"][0]["delta"]["content"] == "so far"
    assert events[1]["error"]["code"] == "engine_failed"
    assert len(events) == 2
    with served.openai() as client:
        stream = client.chat.completions.create(
            model="base", messages=[{"role": "user", "content": "!break"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the engine core died"):
            list(stream)
    wait_for(lambda: served.counts() == {("base", "engine_failed"): 2})  # the client does not read to the end


def test_a_request_that_takes_too_long(start: Start) -> None:
    slow = start(request_timeout_s=0.2)
    slow.up()
    for stream in (False, True):
        assert code(slow.chat("!hang", stream=stream)) == (504, "timed_out")
    engine = slow.cluster.scripted("base")
    assert wait_for(engine.closed.is_set)
    assert code(slow.post("/inference_model", {"model": "base", "inputText": "!hang"})) == (504, "timed_out")
    events = data(slow.chat("!drip", stream=True).text)
    assert events[-1]["error"]["code"] == "timed_out"
    assert slow.counts() == {("base", "timed_out"): 4}
    assert slow.in_flight() == 0


def test_a_client_that_leaves_frees_its_place(served: Installation) -> None:
    engine = served.cluster.scripted("base")
    body = {**CHAT, "messages": [{"role": "user", "content": "!drip"}], "stream": True}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: httpx closes the connection when its iterator goes
        next(lines)
        assert served.in_flight() == 1
    wait_for(engine.closed.is_set)
    wait_for(lambda: served.counts() == {("base", "client_disconnected"): 1})
    assert served.in_flight() == 0


def ask_and_leave(served: Installation, body: dict[str, Any]) -> None:
    """A client that goes away when the engine has its request, and has read nothing."""
    raw, seen = json.dumps(body).encode(), len(served.cluster.scripted("base").calls)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection(served.socket.getsockname()) as client:
        client.sendall(head.encode() + raw)
        wait_for(lambda: len(served.cluster.scripted("base").calls) > seen)


def test_a_client_that_leaves_before_the_first_token_frees_its_place(served: Installation) -> None:
    engine = served.cluster.scripted("base")
    body = {**CHAT, "messages": [{"role": "user", "content": "!late"}], "stream": True}
    ask_and_leave(served, body)
    served.loop.call_soon_threadsafe(engine.release.set)
    wait_for(engine.closed.is_set)
    wait_for(lambda: served.counts() == {("base", "client_disconnected"): 1})
    assert served.in_flight() == 0


def test_a_client_that_leaves_before_a_whole_answer_frees_its_place(served: Installation) -> None:
    engine = served.cluster.scripted("base")
    body = {**CHAT, "messages": [{"role": "user", "content": "!hang"}]}
    ask_and_leave(served, body)
    wait_for(engine.closed.is_set)
    wait_for(lambda: served.counts() == {("base", "client_disconnected"): 1})
    assert served.in_flight() == 0


def test_a_client_that_reads_nothing_is_cut(start: Start) -> None:
    """Its stream would fill a gateway: 40 MB of it."""
    running = start(limits=RequestLimits(write_timeout_s=0.5))
    running.up()
    body = {
        **CHAT,
        "messages": [{"role": "user", "content": 2000 * "a"}],
        "stream": True,
        "min_tokens": 20_000,
    }
    raw = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(running.socket.getsockname())
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n"
        client.sendall(head.encode() + raw)
        wait_for(lambda: running.counts() == {("base", "cut"): 1})
        assert running.in_flight() == 0
    assert running.chat("still here").status_code == 200


# --- metrics -------------------------------------------------------------------------------------


def test_each_request_is_counted_once_under_bounded_labels(served: Installation) -> None:
    served.chat("x")
    served.chat("x", stream=True)
    served.chat("x", "base:v1")
    served.post("/inference_model", {"model": "v1", "inputText": "x"})
    for n in range(5):
        served.chat("x", f"made-up-{n}")
    served.chat("x", max_tokens="99")
    served.http.post("/v1/completions", content=b"{")
    assert served.counts() == {
        ("base", "ok"): 2,
        ("v1", "ok"): 2,
        (UNKNOWN, "model_not_found"): 5,
        ("base", "invalid_request"): 1,
        (UNKNOWN, "invalid_request"): 1,
    }
    assert {c for _, c in served.counts()} <= {*errors.error_classes(), "ok", "client_disconnected"}
    assert errors.OstinatoError.code in errors.error_classes()
