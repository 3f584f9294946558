"""Answers and messages of ASGI are those of uvicorn, byte for byte, unless those may mislead a client."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from testkit.workers.http1_connections import Wire, connected, part, start, turns
from workers.asgi import DIRECT, AsgiApp, DirectRequest
from workers.http1.limits import BODY_BYTES

BODY = b'{"model": "m"}'
ASKED = b"POST /v1/x?a=b HTTP/1.1\r\nHost: x\r\nX-A: 1\r\ncontent-length: 14\r\n\r\n" + BODY
DEFAULT_HEADERS = [(b"date", b"today"), (b"server", b"it")]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uvicorn.error", "workers.http1.served_request"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def of_uvicorn(app: AsgiApp) -> tuple[Any, Wire]:
    config = uvicorn.Config(app, log_config=None, lifespan="off", proxy_headers=False, interface="asgi3")
    config.load()
    state = ServerState()
    state.default_headers = DEFAULT_HEADERS
    protocol, wire = HttpToolsProtocol(config, state, {}, asyncio.get_running_loop()), Wire()
    protocol.connection_made(wire)
    return protocol, wire


def ours(app: AsgiApp) -> tuple[Any, Wire]:
    return connected(app, headers=DEFAULT_HEADERS)


async def on_wire(make: Callable[[AsgiApp], tuple[Any, Wire]], app: AsgiApp, *received: bytes) -> Wire:
    """The wire after each received piece was handled."""
    protocol, wire = make(app)
    for data in received:
        protocol.data_received(data)
        await turns()
    return wire


async def same(app: AsgiApp, *received: bytes) -> bytes:
    found, expected = await on_wire(ours, app, *received), await on_wire(of_uvicorn, app, *received)
    assert (found.written, found.closed) == (expected.written, expected.closed)
    return found.written


def sending(*messages: dict[str, Any]) -> AsgiApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


LENGTH = (b"content-length", b"5")
ANSWERS = {
    "whole": [start(LENGTH, (b"x-b", b"2")), part(b"12345")],
    "no length": [start(), part(b"12345")],
    "empty": [start((b"content-length", b"0")), part(b"")],
    "spelt otherwise": [start((b"Content-Length", b"5")), part(b"12345")],
    "in pieces": [start(LENGTH), part(b"123", more=True), part(b"45")],
    "its end apart": [start(LENGTH), part(b"12345", more=True), part(b"")],
    "events": [start((b"content-type", b"text/event-stream")), part(b"1", more=True), part(b"")],
    "closing": [start(LENGTH, (b"connection", b"close")), part(b"12345")],
    "chunked by hand": [start((b"transfer-encoding", b"chunked")), part(b"12345")],
    "no body": [start(status=204), part(b"")],
    "none": [],
    "body first": [part(b"12345")],
}
BROKEN = {
    "no number": [start((b"content-length", b"five")), part(b"12345")],
    "too short": [start(LENGTH), part(b"123")],
    "too long": [start(LENGTH), part(b"1234567")],
    "head alone": [start(LENGTH)],
    "no end": [start(LENGTH), part(b"123", more=True)],
    "no end of chunks": [start(), part(b"123", more=True)],
}
REQUESTS = {
    "plain": ASKED,
    "close": ASKED.replace(b"X-A: 1", b"connection: close"),
    "put": ASKED.replace(b"POST", b"PUT"),
    "head": ASKED.replace(b"POST", b"HEAD"),
    "expect": ASKED.replace(b"X-A: 1", b"Expect: 100-continue"),
    "quoted": ASKED.replace(b"/v1/x?a=b", b"/v1/%41?a#b"),
}


@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_the_bytes_of_answers(answer: list[dict[str, Any]], asked: bytes) -> None:
    await same(sending(*answer), asked)


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_a_broken_answer_cannot_pass_for_a_whole_one(answer: list[dict[str, Any]]) -> None:
    """If nothing was sent so far, the client gets an error."""
    wire = await on_wire(ours, sending(*answer), ASKED)
    assert wire.closed
    head, _, body = wire.written.partition(b"\r\n\r\n")
    assert b" 500 " in head.splitlines()[0] or body in (b"123", b"3\r\n123\r\n")


async def test_an_error_behind_a_whole_answer_does_not_disturb_the_next_request() -> None:
    app = sending(*ANSWERS["whole"], *ANSWERS["whole"])
    wire = await on_wire(ours, app, ASKED, ASKED)
    assert wire.written.count(b"12345") == 2
    assert not wire.is_closing()


@pytest.mark.parametrize("answer", ["whole", "no length", "events", "no body"])
async def test_a_client_of_http_1_0_gets_no_chunks(answer: str) -> None:
    """The end of the connection ends a body without a length (RFC 9112, 6.3)."""
    wire = await on_wire(ours, sending(*ANSWERS[answer]), ASKED.replace(b"1.1\r\n", b"1.0\r\n"))
    head, _, body = wire.written.partition(b"\r\n\r\n")
    sent = b"".join(message.get("body", b"") for message in ANSWERS[answer])
    assert (body, wire.closed) == (sent, True)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


async def test_requests_in_a_row_are_answered_in_their_order() -> None:
    app = sending(*ANSWERS["whole"])
    assert (await same(app, ASKED, ASKED)).count(b"12345") == 2
    assert (await same(app, ASKED + ASKED, ASKED)).count(b"12345") == 3


async def test_many_requests_at_once_are_answered() -> None:
    wire = await on_wire(ours, sending(*ANSWERS["whole"]), 2000 * ASKED)
    await turns(10_000)
    assert wire.written.count(b"12345") == 2000
    assert wire.reading


async def test_data_that_is_not_http_is_refused() -> None:
    assert b"400 Bad Request" in await same(sending(*ANSWERS["whole"]), b"nonsense\r\n\r\n")


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r"])
async def test_a_header_cannot_begin_another(end: bytes) -> None:
    app = sending(start(LENGTH, (b"x-id", b"1" + end + b"set-cookie: a=b")), part(b"12345"))
    written = (await on_wire(ours, app, ASKED)).written
    assert b"set-cookie" not in written
    assert b"500" in written.splitlines()[0]


# --- the request's body ----------------------------------------------------------------------------


async def test_a_long_body_waits_for_its_reader() -> None:
    may_read = asyncio.Event()
    got = b""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        await may_read.wait()
        more = True
        while more:
            message = await receive()
            got, more = got + message["body"], message["more_body"]
        await send(start(LENGTH))
        await send(part(b"12345"))

    connection, wire = connected(app)
    connection.data_received(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + b"x" * (BODY_BYTES + 1))
    await turns()
    assert not wire.is_reading()
    may_read.set()
    await turns()
    assert wire.reading
    connection.data_received(b"x" * (200_000 - BODY_BYTES - 1))
    await turns()
    assert got == b"x" * 200_000


async def test_a_client_that_waits_for_an_invitation_gets_it_when_the_body_is_read() -> None:
    may_read = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await may_read.wait()
        assert (await receive())["body"] == BODY
        await send(start(LENGTH))
        await send(part(b"12345"))

    connection, wire = connected(app)
    head, body = ASKED.replace(b"X-A: 1", b"Expect: 100-Continue").split(b"\r\n\r\n")
    connection.data_received(head + b"\r\n\r\n")
    await turns()
    assert wire.written == b""
    may_read.set()
    await turns()
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.data_received(body)
    await turns()
    assert wire.writes[1].startswith(b"HTTP/1.1 200 OK")
    assert not wire.is_closing()


async def test_a_client_that_was_not_invited_cannot_go_on() -> None:
    """It may send the body or not: the server could not tell the body from the next request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(LENGTH))
        await send(part(b"12345"))

    connection, wire = connected(app)
    head = ASKED.replace(b"X-A: 1", b"Expect: 100-continue").partition(BODY)[0]
    connection.data_received(head)
    await turns()
    assert b"connection: close" in wire.written
    assert wire.closed


# --- answers without ASGI's messages ---------------------------------------------------------------


async def test_a_direct_answer_has_the_same_bytes() -> None:
    async def direct(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked: DirectRequest = scope[DIRECT]
        assert asked.answer(200, [LENGTH, (b"x-b", b"2")], b"12345")
        assert not asked.answer(200, [LENGTH], b"again")

    for asked in REQUESTS.values():
        found = await on_wire(ours, direct, asked)
        expected = await on_wire(of_uvicorn, sending(*ANSWERS["whole"]), asked)
        assert (found.written, found.closed) == (expected.written, expected.closed)


async def test_a_direct_answer_does_not_overtake_nor_fill_memory() -> None:
    said: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked: DirectRequest = scope[DIRECT]
        connection.pause_writing()
        said.append(asked.answer(200, [LENGTH], b"12345"))
        connection.resume_writing()
        await send(start(LENGTH))
        said.append(asked.answer(200, [LENGTH], b"12345"))
        await send(part(b"54321"))
        connection.connection_lost(None)
        said.append(asked.answer(200, [LENGTH], b"12345"))

    connection, wire = connected(app)
    connection.data_received(ASKED)
    await turns()
    assert said == [False] * 3
    assert wire.written.endswith(b"54321")
    assert b"12345" not in wire.written


# --- bodies without ASGI's messages -----------------------------------------------------------------


class Reading:
    """An application that asks for the body directly, and then for ASGI's messages."""

    def __init__(self) -> None:
        self.bodies: list[bytes | None] = []
        self.messages: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked: DirectRequest = scope[DIRECT]
        self.bodies += [asked.body(), asked.body()]
        while not self.messages or self.messages[-1]["type"] != "http.disconnect":
            self.messages.append(await receive())


async def test_a_body_that_is_there_is_read_once_and_leaving_is_still_seen() -> None:
    app = Reading()
    connection, _ = connected(app)
    connection.data_received(ASKED)
    await turns()
    assert (app.bodies, app.messages) == ([BODY, None], [])
    connection.connection_lost(None)
    await turns()
    assert app.messages == [{"type": "http.disconnect"}]


@pytest.mark.parametrize("cut", [1, len(BODY)])
async def test_a_body_of_which_a_part_is_missing_is_received(cut: int) -> None:
    app = Reading()
    connection, _ = connected(app)
    connection.data_received(ASKED[:-cut])
    await turns()
    assert app.bodies == [None, None]
    connection.data_received(ASKED[-cut:])
    await turns()
    assert b"".join(message["body"] for message in app.messages) == BODY
    assert not app.messages[-1]["more_body"]
    connection.connection_lost(None)


async def test_reading_goes_on_behind_a_large_body() -> None:
    app, body = Reading(), b"x" * (2 * BODY_BYTES)
    connection, wire = connected(app)
    connection.data_received(ASKED.replace(b"length: 14", b"length: %d" % len(body)).replace(BODY, body))
    assert not wire.reading
    await turns()
    assert (app.bodies, wire.reading) == ([body, None], True)
    connection.connection_lost(None)


# --- clients that leave ----------------------------------------------------------------------------


class Waiting:
    """An application that waits before its answer, and registers for the client's leaving."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.left = 0
        self.stop: Callable[[], None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        direct: DirectRequest = scope[DIRECT]
        self.stop = direct.call(self._leave)
        await self.may_answer.wait()
        await send(start(LENGTH))
        await send(part(b"12345"))

    def _leave(self) -> None:
        self.left += 1


async def test_the_application_is_called_once_when_its_client_leaves() -> None:
    app = Waiting()
    connection, wire = connected(app)
    connection.data_received(ASKED)
    await turns()
    assert app.left == 0
    connection.connection_lost(None)
    await turns()
    assert app.left == 1
    app.may_answer.set()
    await turns()
    assert (app.left, wire.written) == (1, b"")


async def test_an_application_is_called_too_if_another_request_waits_behind() -> None:
    app = Waiting()
    connection, _ = connected(app)
    connection.data_received(ASKED)
    connection.data_received(ASKED)
    await turns()
    connection.connection_lost(None)
    await turns()
    assert app.left == 1


@pytest.mark.parametrize("stops", [True, False])
async def test_an_application_is_not_called_after_its_answer_nor_against_its_will(stops: bool) -> None:
    app = Waiting()
    connection, wire = connected(app)
    connection.data_received(ASKED)
    await turns()
    if stops:
        assert app.stop is not None
        app.stop()
    else:
        app.may_answer.set()
        await turns()
        assert wire.written.endswith(b"12345")
    connection.connection_lost(None)
    await turns()
    assert app.left == 0


async def test_an_application_that_begins_after_its_client_left_is_called_soon() -> None:
    app = Waiting()
    connection, _ = connected(app)
    connection.data_received(ASKED)
    connection.connection_lost(None)  # before the application begins
    await turns()
    assert app.left == 1


async def test_each_waiter_gets_the_disconnect() -> None:
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        heard.extend(await asyncio.gather(receive(), receive()))

    connection, _ = connected(app)
    connection.data_received(ASKED)
    await turns()
    connection.connection_lost(None)
    await turns()
    assert heard == [{"type": "http.disconnect"}] * 2


async def test_a_client_that_leaves_is_seen_while_its_next_requests_wait() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        heard.append((await receive())["type"])

    connection, wire = connected(app)
    connection.data_received(ASKED + ASKED)
    await turns()
    assert wire.reading
    connection.connection_lost(None)
    await turns()
    assert heard == ["http.disconnect"]


# --- the end of a server ---------------------------------------------------------------------------


async def test_a_server_that_ends_completes_answers_and_closes_connections() -> None:
    app = Waiting()
    idle, idle_wire = connected(app)
    connection, wire = connected(app)
    connection.data_received(ASKED)
    await turns()
    idle.shutdown()
    connection.shutdown()
    assert (idle_wire.closed, wire.closed) == (True, False)
    app.may_answer.set()
    await turns()
    assert wire.written.endswith(b"connection: close\r\n\r\n12345")
    assert wire.closed


# --- memory ----------------------------------------------------------------------------------------


async def test_answered_requests_leave_no_work_for_the_garbage_collector() -> None:
    seen: list[weakref.ref[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(weakref.ref(scope[DIRECT]))
        await sending(*ANSWERS["whole"])(scope, receive, send)

    connection, _ = connected(app)
    gc.disable()
    try:
        for _ in range(3):
            connection.data_received(ASKED)
            await turns()
        assert [each() is None for each in seen] == [True, True, False]  # the connection has the last one
    finally:
        gc.enable()
    connection.connection_lost(None)
