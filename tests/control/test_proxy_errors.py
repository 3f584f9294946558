"""What Serve's proxy would answer by itself, in our words; played by an application that does as the proxy
does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http import auto

from controlplane import errors
from controlplane.runtime import proxy_errors
from controlplane.runtime.proxy_errors import DIED, DocumentedErrors
from controlplane.runtime.proxy_shedding import SheddingConnection


def start(status: int, kind: str) -> Message:
    headers = [(b"content-type", kind.encode()), (b"x-serve", b"1")]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def answered(*messages: Message, path: str = "/v1/models") -> httpx.Response:
    """What a client gets where the proxy's application sends these, and no more."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    transport = httpx.ASGITransport(DocumentedErrors(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        return await client.get(path)


def error_of(reply: httpx.Response) -> errors.OstinatoError:
    return errors.error_from_body(reply.json())


async def test_a_gateway_that_died_is_an_error_of_ours() -> None:
    """Serve's proxy sends nothing then, of which its server makes an empty 500."""
    reply = await answered()
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json() == DIED.body()
    assert isinstance(error_of(reply), errors.Unavailable)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, errors.Unavailable),  # no application yet: ours has every path
        (429, errors.Overloaded),
        (500, errors.OstinatoError),
        (503, errors.Unavailable),
    ],
)
async def test_a_sentence_of_the_proxys_is_an_error_of_ours(
    status: int, kind: type[errors.OstinatoError]
) -> None:
    reply = await answered(start(status, "text/plain; charset=utf-8"), body(b"Path '/' not found."))
    found = error_of(reply)
    assert type(found) is kind
    assert (reply.status_code, reply.headers["content-type"]) == (kind.status, "application/json")
    assert ("retry-after" in reply.headers) is (kind is not errors.OstinatoError)


@pytest.mark.parametrize("status", [200, 400, 404, 500, 503])
async def test_what_gateways_answer_goes_on_as_it_is(status: int) -> None:
    reply = await answered(start(status, "application/json"), body(b"[1,", more=True), body(b"2]"))
    assert (reply.status_code, reply.content, reply.headers["x-serve"]) == (status, b"[1,2]", "1")


async def test_nor_are_metrics_and_the_proxys_probes_touched() -> None:
    reply = await answered(start(200, "text/plain"), body(b"ostinato_up 1"))
    assert reply.text == "ostinato_up 1"
    probe = await answered(start(503, "text/plain"), body(b"draining"), path="/-/healthz")
    assert (probe.status_code, probe.text) == (503, "draining")


@pytest.mark.parametrize("path", ["/-/routes", "/-/routes/", "/-/Routes", "/-/routes?x=1"])
async def test_what_runs_behind_the_proxy_is_told_to_nobody(path: str) -> None:
    reply = await answered(start(200, "application/json"), body(b'{"/": "ostinato"}'), path=path)
    assert reply.status_code == 403
    assert isinstance(error_of(reply), errors.Forbidden)


async def test_a_stream_whose_gateway_died_ends_with_an_error_event() -> None:
    reply = await answered(start(200, "text/event-stream; charset=utf-8"), body(b"data: 1\n\n", more=True))
    first, last = reply.text.split("\n\n")[:2]
    assert first == "data: 1"
    assert last.startswith('data: {"error": {"message": "the gateway that had this request ended')


async def test_a_stream_that_ended_has_no_more_events() -> None:
    reply = await answered(start(200, "text/event-stream"), body(b"data: [DONE]\n\n", more=True), body(b""))
    assert reply.text == "data: [DONE]\n\n"


def test_serves_proxy_is_given_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the form that it accepts; the limits of heads hold beside it."""
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.long_poll import LongPollClient

    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # put back afterwards
    monkeypatch.setattr(LongPollClient, "_poll_next", LongPollClient._poll_next)
    given: list[Any] = validate_http_proxy_callback_return(proxy_errors.prepare())
    assert [each.cls for each in given] == [DocumentedErrors]
    assert auto.AutoHTTPProtocol is SheddingConnection
