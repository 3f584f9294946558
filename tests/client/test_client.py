from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from controlplane import errors
from controlplane.client import client as client_module
from controlplane.client.client import Client
from controlplane.errors import error_classes
from controlplane.management.schemas.deploy import DeployModelRequest
from controlplane.management.schemas.models import InferenceModelRequest, RegisterModelRequest
from testkit.client.fake_api import (
    FakeApi,
    answer,
    chat_chunks,
    deployment,
    error,
    events,
    model,
    operation,
    text,
)

REGISTER = RegisterModelRequest(model="smol", source="bundled://smol")
DEPLOY = DeployModelRequest(model="smol")
INFER = InferenceModelRequest(model="smol", inputText="2+2?")
TALK = [{"role": "user", "content": "hi"}]


class Slept(list[float]):
    """A clock that only `sleep` moves."""

    def sleep(self, seconds: float) -> None:
        self.append(seconds)

    def now(self) -> float:
        return sum(self)


@pytest.fixture
def slept() -> Slept:
    return Slept()


@pytest.fixture
def client(api: FakeApi, slept: Slept) -> Iterator[Client]:
    with Client(api.url, api_key="secret", sleep=slept.sleep, clock=slept.now) as client:
        yield client


def test_each_call_returns_its_view(client: Client) -> None:
    assert client.register_model(REGISTER).kind == "register_model"
    assert client.deploy_model(DEPLOY).phase == "Pending"
    assert client.inference_model(INFER).outputText == "four"
    assert [m.model for m in client.models()] == ["v1", "smol"]
    assert client.model("smol").weightBytes == 3 << 20
    assert client.delete_model("smol").done
    (listed,) = client.deployments()
    described = client.deployment("smol")
    assert listed == described.model_copy(update={"residency": None})
    assert [v.tier for v in (described.residency or [])[0].variants] == ["device", "host"]
    assert client.tune("smol", 2).maxActiveVariants == 2
    assert client.prefetch("v1").model == "v1"
    assert client.undeploy("smol").kind == "undeploy_model"
    assert [o.id for o in client.operations()] == ["op-1"]
    assert client.operation("op-1").progress == 0.5
    assert client.cancel("op-1").phase == "Deploying"
    assert client.status().engines[0].variants == ["v1"]
    assert client.logs("smol", lines=2) == "one\ntwo\n"


def test_the_key_is_sent_as_a_bearer_token(client: Client, api: FakeApi) -> None:
    client.models()
    assert api.calls("GET /models")[0][1]["authorization"] == "Bearer secret"


def test_url_and_key_come_from_the_environment(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_URL", api.url)
    monkeypatch.setenv("OSTINATO_API_KEY", "from-env")
    with Client() as client:
        client.models()
    assert api.calls("GET /models")[0][1]["authorization"] == "Bearer from-env"


def test_a_name_cannot_change_the_path(client: Client, api: FakeApi) -> None:
    with pytest.raises(errors.InvalidRequest):
        client.model("../status")
    assert "GET /status" not in [route for route, _, _ in api.asked]


@pytest.mark.parametrize(
    ("route", "call"),
    [
        ("POST /register_model", lambda c: c.register_model(REGISTER)),
        ("POST /deploy_model", lambda c: c.deploy_model(DEPLOY)),
        ("DELETE /deployments/smol", lambda c: c.undeploy("smol")),
        ("DELETE /models/smol", lambda c: c.delete_model("smol")),
    ],
)
def test_a_503_is_retried_with_the_same_key(
    route: str, call: Callable[[Client], Any], client: Client, api: FakeApi, slept: Slept
) -> None:
    busy = answer(error("unavailable"), 503, Retry_After="2")
    api.script(route, busy, answer(operation("Pending"), 202))
    assert call(client).id == "op-1"
    call(client)
    first, second, other = [headers["idempotency-key"] for _, headers in api.calls(route)]
    assert first == second != other
    assert slept == [2.0]


def test_retries_end(client: Client, api: FakeApi, slept: Slept) -> None:
    api.script("POST /deploy_model", answer(error("unavailable"), 503, Retry_After="1"))
    with pytest.raises(errors.Unavailable) as caught:
        client.deploy_model(DEPLOY)
    assert caught.value.retry_after_s == 1.0
    assert len(api.calls("POST /deploy_model")) == client_module.ATTEMPTS
    assert len(slept) == client_module.ATTEMPTS - 1


@pytest.mark.parametrize(
    "headers", [{}, {"Retry_After": "3600"}, {"Retry_After": "Fri, 31 Dec 2027 23:59:59 GMT"}]
)
def test_a_503_without_a_near_time_is_not_retried(
    headers: dict[str, str], client: Client, api: FakeApi
) -> None:
    api.script("POST /deploy_model", answer(error("unavailable"), 503, **headers))
    with pytest.raises(errors.Unavailable):
        client.deploy_model(DEPLOY)
    assert len(api.calls("POST /deploy_model")) == 1


def test_an_inference_is_not_repeated(client: Client, api: FakeApi) -> None:
    api.script("POST /inference_model", answer(error("unavailable"), 503, Retry_After="1"))
    with pytest.raises(errors.Unavailable):
        client.inference_model(INFER)
    assert len(api.calls("POST /inference_model")) == 1


def test_a_connection_broken_midway_is_retried_with_the_same_key(client: Client, api: FakeApi) -> None:
    api.script("POST /deploy_model", events(breaks=True), answer(operation("Pending"), 202))
    assert client.deploy_model(DEPLOY).id == "op-1"
    first, second = [headers["idempotency-key"] for _, headers in api.calls("POST /deploy_model")]
    assert first == second


def test_nothing_answers(nowhere: str, slept: Slept) -> None:
    with Client(nowhere, sleep=slept.sleep) as client:
        with pytest.raises(errors.Unavailable, match="ostinato up") as caught:
            client.models()
        with pytest.raises(errors.Unavailable, match="ostinato up"):
            list(client.watch("op-1"))
        with pytest.raises(errors.Unavailable, match="ostinato up"):
            list(client.chat_stream("smol", TALK))
    assert caught.value.details["reachable"] is False
    assert len(slept) == 2 * (client_module.ATTEMPTS - 1)


@pytest.mark.parametrize("url", ["foo", "ftp://host", "http://", "http://host:port"])
def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="URL"):
        Client(url)


@pytest.mark.parametrize("code", sorted(error_classes()))
def test_every_code_comes_back_as_its_class(code: str, client: Client, api: FakeApi) -> None:
    cls = error_classes()[code]
    body = cls("what; do", param="model", details={"used_by": ["x"]}).body()
    api.script("GET /models", answer(body, cls.status))
    with pytest.raises(errors.OstinatoError) as caught:
        client.models()
    assert type(caught.value) is cls
    assert caught.value.body() == body


def test_an_unknown_code_is_kept(client: Client, api: FakeApi) -> None:
    api.script("GET /models", answer(error("from_the_future"), 418))
    with pytest.raises(errors.OstinatoError, match="it went wrong") as caught:
        client.models()
    assert type(caught.value) is errors.OstinatoError
    assert caught.value.details == {"code": "from_the_future"}


@pytest.mark.parametrize(
    ("status", "cls"), [(503, errors.Unavailable), (429, errors.Overloaded), (404, errors.OstinatoError)]
)
def test_an_answer_of_something_else_is_an_error(
    status: int, cls: type[errors.OstinatoError], client: Client, api: FakeApi
) -> None:
    api.script("GET /models", text("<h1>proxy</h1>", status))
    with pytest.raises(cls, match="proxy"):
        client.models()


def test_a_nonsense_answer_is_an_error(client: Client, api: FakeApi) -> None:
    api.script("GET /models/smol", answer({"model": "smol"}))
    with pytest.raises(errors.OstinatoError, match="ModelView"):
        client.model("smol")


def test_a_client_accepts_new_fields_of_a_later_server(client: Client, api: FakeApi) -> None:
    api.script("GET /models/smol", answer(model(colour="red")))
    api.script("GET /deployments/smol", answer(deployment(colour="red")))
    assert client.model("smol").model == client.deployment("smol").model


def test_watch_ends_with_the_operation(client: Client) -> None:
    assert [v.phase for v in client.watch("op-1")] == ["Deploying", "Deployed"]


@pytest.mark.parametrize("breaks", [True, False])
def test_watch_goes_on_when_the_stream_ends_early(breaks: bool, client: Client, api: FakeApi) -> None:
    half = operation("Deploying", 0.5)
    api.script(
        "GET /operations/op-1/watch",
        events(operation("Pending", 0.0), half, breaks=breaks),
        answer(error("unavailable"), 503),
        events(half, operation()),
    )
    assert [v.phase for v in client.watch("op-1")] == ["Pending", "Deploying", "Deployed"]


def test_watch_gives_up(client: Client, api: FakeApi) -> None:
    api.script("GET /operations/op-1/watch", events(operation("Deploying", 0.5)))
    with pytest.raises(errors.Unavailable, match="breaking off"):
        list(client.watch("op-1"))
    assert len(api.calls("GET /operations/op-1/watch")) == client_module.RECONNECTS + 1


def test_watch_of_an_unknown_operation(client: Client, api: FakeApi) -> None:
    api.script("GET /operations/op-1/watch", answer(error("operation_not_found"), 404))
    with pytest.raises(errors.OperationNotFound):
        list(client.watch("op-1"))
    assert len(api.calls("GET /operations/op-1/watch")) == 1


def test_text_in_events_may_hold_any_character(client: Client, api: FakeApi) -> None:
    odd = "a\u2028b\x85c"
    api.script("GET /operations/op-1/watch", events(operation(reason=odd)))
    assert [v.reason for v in client.watch("op-1")] == [odd]


def test_wait_returns_the_end(client: Client) -> None:
    assert client.wait("op-1").phase == "Deployed"
    assert client.wait(client.deploy_model(DEPLOY), timeout_s=5).done


def test_wait_raises_the_operation_s_error(client: Client, api: FakeApi) -> None:
    failed = operation("Failed", error=error("no_feasible_plan", "too big; shrink it")["error"])
    api.script("GET /operations/op-1/watch", events(failed))
    with pytest.raises(errors.NoFeasiblePlan, match="too big"):
        client.wait("op-1")


def test_wait_has_a_limit(api: FakeApi) -> None:
    """Real time: the stream says nothing new for as long as the client waits."""
    hold = threading.Event()
    api.script("GET /operations/op-1/watch", events(operation("Deploying", 0.5), hold=hold))
    try:
        with Client(api.url) as client, pytest.raises(TimeoutError, match="op-1"):
            client.wait("op-1", timeout_s=0.2)
    finally:
        hold.set()


def test_chat_streams_its_text(client: Client, api: FakeApi) -> None:
    api.script("POST /v1/chat/completions", chat_chunks("Hé", "\u2028", "[llo]"))
    assert "".join(client.chat_stream("smol", TALK, max_tokens=8)) == "Hé\u2028[llo]"
    body = {"model": "smol", "messages": TALK, "stream": True, "max_tokens": 8}
    assert api.calls("POST /v1/chat/completions")[0][0] == body


def test_an_error_before_and_in_a_chat(client: Client, api: FakeApi) -> None:
    route = "POST /v1/chat/completions"
    api.script(route, answer(error("not_deployed"), 404), events(error("overloaded")))
    with pytest.raises(errors.NotDeployed):
        list(client.chat_stream("smol", TALK))
    with pytest.raises(errors.Overloaded):
        list(client.chat_stream("smol", TALK))


@pytest.mark.parametrize("stream", [events({"choices": []}), events("nonsense"), events({"choices": [1]})])
def test_a_chat_that_breaks_off_is_an_error(stream: Any, client: Client, api: FakeApi) -> None:
    api.script("POST /v1/chat/completions", stream)
    with pytest.raises(errors.EngineFailed):
        list(client.chat_stream("smol", TALK))
