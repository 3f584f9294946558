"""The layer that answers inference requests before all of a server's other layers: the same answers, and an
id."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.api.app import create_app, inference_only
from controlplane.api.inference import answering
from controlplane.api.inference.fast_path import InferenceFirst
from testkit.api.installations import Installation, Start
from workers.asgi import DIRECT

CHAT = "/v1/chat/completions"
BODY = {"model": "base", "messages": [{"role": "user", "content": "a b"}]}


async def others(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 299, "headers": headers})
    await send({"type": "http.response.body", "body": b"other"})


def first(installation: Installation) -> ASGIApp:
    return InferenceFirst(others, inference_only(installation.services))


def ask(
    installation: Installation, app: ASGIApp, method: str, path: str, content: bytes, **headers: str
) -> httpx.Response:
    """In the installation's loop, where its connections to workers are."""

    async def asking() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, content=content, headers=headers)

    return asyncio.run_coroutine_threadsafe(asking(), installation.loop).result(60)


def same(content: bytes, path: str, installation: Installation, **headers: str) -> httpx.Response:
    """The answer, which is the one that the whole application gives."""
    ours = ask(installation, first(installation), "POST", path, content, **headers)
    whole = ask(installation, create_app(lambda: installation.services), "POST", path, content, **headers)
    assert (ours.status_code, ours.content) == (whole.status_code, whole.content)
    named = {"content-type", "content-length", "retry-after", "www-authenticate"}
    assert {k: v for k, v in ours.headers.items() if k in named} == {
        k: v for k, v in whole.headers.items() if k in named
    }
    return ours


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_answers(standing: Installation, path: str, stream: bool) -> None:
    text = {"prompt": "a b"} if path != CHAT else {"messages": BODY["messages"]}
    reply = same(json.dumps({"model": "v1", "stream": stream, **text}).encode(), path, standing)
    assert reply.status_code == 200
    assert b"a" in reply.content


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": 1}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "none"}', 404),
        (json.dumps({**BODY, "max_tokens": -1}).encode(), 400),
        (json.dumps({**BODY, "max_tokens": True}).encode(), 400),
        (b'{"model": "\\ud800"}', 400),
        (json.dumps({"model": "base", "messages": 1}).encode(), 400),
    ],
)
def test_inference_first_refuses_like_the_application(
    standing: Installation, content: bytes, status: int
) -> None:
    assert same(content, CHAT, standing).status_code == status


def test_inference_first_checks_keys_like_the_application(start: Start) -> None:
    guarded = start(api_key="key", max_body_bytes=2000)
    refused = same(json.dumps(BODY).encode(), CHAT, guarded)
    assert refused.json()["error"]["code"] == "unauthorized"
    assert same(b"x" * 3000, CHAT, guarded, authorization="Bearer key").status_code == 413


def test_a_mistake_of_ours_is_an_error_with_a_body(
    standing: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(answering, "answer", fail)
    reply = ask(standing, first(standing), "POST", CHAT, json.dumps(BODY).encode())
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"


def test_answers_bear_the_request_id(standing: Installation) -> None:
    content = json.dumps(BODY).encode()
    mine = ask(standing, first(standing), "POST", CHAT, content, **{"X-Request-ID": "mine"})
    assert mine.headers["x-request-id"] == "mine"
    made = {ask(standing, first(standing), "POST", CHAT, content).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert ask(standing, first(standing), "POST", CHAT, b"{").headers["x-request-id"]


class Direct:
    """A server that takes whole answers without ASGI's messages, if it `takes` any, and gives a whole
    `body`."""

    def __init__(self, takes: bool, body: bytes | None = None) -> None:
        self.takes = takes
        self.whole = body
        self.answered: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None

    def body(self) -> bytes | None:
        return self.whole

    def call(self, on_leaving: Any) -> Any:
        return lambda: None

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        if self.takes:
            self.answered = (status, headers, body)
        return self.takes


def before(direct: Direct, inner: ASGIApp) -> ASGIApp:
    """The application behind such a server."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT] = direct
        await inner(scope, receive, send)
        if direct.answered is not None:
            status, headers, body = direct.answered
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["base", "none"])
def test_the_same_answers_without_messages(
    standing: Installation, takes: bool, stream: bool, model: str
) -> None:
    direct = Direct(takes)

    content = json.dumps({**BODY, "model": model, "stream": stream}).encode()
    by_messages = ask(standing, first(standing), "POST", CHAT, content, **{"X-Request-ID": "mine"})
    direct_one = ask(
        standing, before(direct, first(standing)), "POST", CHAT, content, **{"X-Request-ID": "mine"}
    )
    assert (direct_one.status_code, direct_one.content) == (by_messages.status_code, by_messages.content)
    assert direct_one.headers.raw == by_messages.headers.raw
    assert (direct.answered is not None) == (takes and not stream and model == "base")


def test_a_body_that_is_there_needs_no_message(standing: Installation) -> None:
    direct = Direct(True, json.dumps(BODY).encode())
    reply = ask(standing, before(direct, first(standing)), "POST", CHAT, b"another body")
    assert reply.json()["choices"][0]["message"]["content"] == "a b"


@pytest.mark.parametrize("headers", [{"content-encoding": "gzip"}, {"transfer-encoding": "chunked"}])
def test_a_body_that_must_be_unpacked_or_counted_is_received(
    standing: Installation, headers: dict[str, str]
) -> None:
    content = json.dumps(BODY).encode()
    sent = gzip.compress(content) if "content-encoding" in headers else content
    app = before(Direct(True, b"neither unpacked nor counted"), first(standing))
    assert ask(standing, app, "POST", CHAT, sent, **headers).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("POST", "/v1/chat"), ("GET", "/v1/models")])
def test_all_else_goes_on(standing: Installation, method: str, path: str) -> None:
    reply = ask(standing, first(standing), method, path, b"{}")
    assert (reply.status_code, reply.text) == (299, "other")
