"""Plain requests are answered as uvicorn's own protocol answers them, byte for byte."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from workers.asgi import DIRECT, AsgiApp, DirectRequest
from workers.server.gathered_writes import GatheringProtocol
from workers.server.plain_requests import PlainCycle

BODY = b'{"model": "m"}'
ASKED = b"POST /v1/x?a=b HTTP/1.1\r\nHost: x\r\nX-A: 1\r\ncontent-length: 14\r\n\r\n" + BODY


class Wire(asyncio.Transport):
    """A connection that keeps what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += bytes(data)
        self.writes += 1

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected(kind: type[HttpToolsProtocol], app: AsgiApp, keep_alive_s: int = 5) -> tuple[Any, Any]:
    """The protocol, and its Wire."""
    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="off",
        proxy_headers=False,
        interface="asgi3",
        timeout_keep_alive=keep_alive_s,
    )
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"today"), (b"server", b"it")]
    protocol = kind(config, state, {}, asyncio.get_running_loop())
    wire = Wire()
    protocol.connection_made(wire)
    return protocol, wire


async def turns(count: int = 12) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def on_wire(kind: type[HttpToolsProtocol], app: AsgiApp, *received: bytes) -> tuple[bytes, bool]:
    """All that the application's answers put on the wire, and whether the connection was closed."""
    protocol, wire = connected(kind, app)
    for data in received:
        protocol.data_received(data)
        await turns()
    return wire.written, wire.closed


async def same(app: AsgiApp, *received: bytes) -> bytes:
    ours = await on_wire(GatheringProtocol, app, *received)
    assert ours == await on_wire(HttpToolsProtocol, app, *received)
    return ours[0]


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def sending(*messages: dict[str, Any]) -> AsgiApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for message in messages:
            await send(message)

    return app


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "disabled", True)


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
    "too short": [start(LENGTH), part(b"123")],
    "too long": [start(LENGTH), part(b"1234567")],
    "head alone": [start(LENGTH)],
    "none": [],
    "twice": [start(LENGTH), part(b"12345"), part(b"12345")],
    "body first": [part(b"12345")],
    "no number": [start((b"content-length", b"five")), part(b"12345")],
}
BROKEN = ("too short", "too long", "head alone")
SAME = [name for name in ANSWERS if name not in BROKEN]


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize(
    "asked",
    [
        ASKED,
        ASKED.replace(b"X-A: 1", b"connection: close"),
        ASKED.replace(b"1.1\r\n", b"1.0\r\n"),
        ASKED.replace(b"POST", b"PUT"),
        ASKED.replace(b"POST", b"HEAD"),
        ASKED.replace(b"X-A: 1", b"Expect: 100-continue"),
        ASKED.replace(b"X-A: 1", b"connection: upgrade\r\nupgrade: h2c"),
        ASKED.replace(b"/v1/x?a=b", b"/v1/%41?a#b"),
    ],
    ids=["plain", "close", "1.0", "put", "head", "expect", "upgrade", "quoted"],
)
async def test_the_same_bytes(name: str, asked: bytes) -> None:
    await same(sending(*ANSWERS[name]), asked)


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_answer_is_never_taken_for_a_whole_one(name: str) -> None:
    """uvicorn's head may have left before; our server can still report the failure."""
    written, closed = await on_wire(GatheringProtocol, sending(*ANSWERS[name]), ASKED)
    assert closed
    head, _, body = written.partition(b"\r\n\r\n")
    assert b" 500 " in head.splitlines()[0] or body != b"12345"


async def test_one_request_after_the_other_and_two_at_once() -> None:
    app = sending(*ANSWERS["whole"])
    assert (await same(app, ASKED, ASKED)).count(b"12345") == 2
    assert (await same(app, ASKED + ASKED, ASKED)).count(b"12345") == 3


async def test_a_request_that_is_not_http_is_refused() -> None:
    assert b"400 Bad Request" in await same(sending(*ANSWERS["whole"]), b"nonsense\r\n\r\n")


async def test_a_whole_answer_is_one_write() -> None:
    protocol, wire = connected(GatheringProtocol, sending(*ANSWERS["whole"]))
    protocol.data_received(ASKED)
    await turns()
    assert isinstance(protocol.cycle, PlainCycle)
    assert wire.writes == 1


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r"])
async def test_a_header_cannot_begin_another(end: bytes) -> None:
    app = sending(start(LENGTH, (b"x-id", b"1" + end + b"set-cookie: a=b")), part(b"12345"))
    written, _ = await on_wire(GatheringProtocol, app, ASKED)
    assert b"set-cookie" not in written
    assert b"500" in written.splitlines()[0]


path = st.lists(
    st.sampled_from([b"/", b"v1", b"a b", b"?", b"x=1", b"&", b"%41", b"#", b"\xc3\xa4", b"."]), max_size=6
)


@given(path, st.sampled_from(["", "/root"]))
def test_the_same_scope(parts: list[bytes], root: str) -> None:
    url = b"/" + b"".join(parts).replace(b" ", b"")
    asked = b"POST " + url + b" HTTP/1.1\r\nhost: x\r\nX-A: 1\r\ncontent-length: 0\r\n\r\n"

    async def scopes(kind: type[HttpToolsProtocol]) -> list[Any]:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append({key: value for key, value in scope.items() if key != DIRECT})

        protocol, _ = connected(kind, app)
        protocol.root_path = root
        protocol.data_received(asked)
        await turns()
        return seen

    async def both() -> None:
        assert await scopes(GatheringProtocol) == await scopes(HttpToolsProtocol)

    asyncio.run(both())


@given(st.lists(st.integers(1, len(ASKED) - 1), max_size=4, unique=True))
def test_a_request_that_comes_in_pieces(cuts: list[int]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        await send(start((b"content-length", str(len(body)).encode())))
        await send(part(body))

    async def asking() -> bytes:
        ends = [*sorted(cuts), len(ASKED)]
        pieces = [ASKED[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        written, _ = await on_wire(GatheringProtocol, app, *pieces)
        return written

    assert asyncio.run(asking()).endswith(b"\r\n\r\n" + BODY)


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

    protocol, wire = connected(GatheringProtocol, app)
    protocol.data_received(b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + b"x" * 100_000)
    await turns()
    assert not wire.reading
    may_read.set()
    await turns()
    assert wire.reading
    protocol.data_received(b"x" * 100_000)
    await turns()
    assert got == b"x" * 200_000


# --- answers without ASGI's messages ---------------------------------------------------------------


async def test_a_direct_answer_is_the_same_bytes() -> None:
    async def direct(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked: DirectRequest = scope[DIRECT]
        assert asked.answer(200, [LENGTH, (b"x-b", b"2")], b"12345")
        assert not asked.answer(200, [LENGTH], b"again")

    for asked in (ASKED, ASKED.replace(b"X-A: 1", b"connection: close")):
        ours = await on_wire(GatheringProtocol, direct, asked)
        assert ours == await on_wire(HttpToolsProtocol, sending(*ANSWERS["whole"]), asked)


async def test_a_direct_answer_does_not_overtake_nor_fill_memory() -> None:
    said: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked: DirectRequest = scope[DIRECT]
        protocol.pause_writing()
        said.append(asked.answer(200, [LENGTH], b"12345"))
        protocol.resume_writing()
        await send(start(LENGTH))
        said.append(asked.answer(200, [LENGTH], b"12345"))
        await send(part(b"54321"))
        protocol.connection_lost(None)
        said.append(asked.answer(200, [LENGTH], b"12345"))

    protocol, wire = connected(GatheringProtocol, app)
    protocol.data_received(ASKED)
    await turns()
    assert said == [False] * 3
    assert wire.written.endswith(b"54321")
    assert b"12345" not in wire.written


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
    protocol, wire = connected(GatheringProtocol, app)
    protocol.data_received(ASKED)
    await turns()
    assert app.left == 0
    protocol.connection_lost(None)
    await turns()
    assert app.left == 1
    app.may_answer.set()
    await turns()
    assert (app.left, wire.written) == (1, b"")


async def test_the_application_is_also_called_with_a_pipelined_request_behind() -> None:
    app = Waiting()
    protocol, _ = connected(GatheringProtocol, app)
    protocol.data_received(ASKED)
    protocol.data_received(ASKED)
    await turns()
    protocol.connection_lost(None)
    await turns()
    assert app.left == 1


async def test_the_application_is_not_called_if_it_declined_or_after_the_answer() -> None:
    for stops in (True, False):
        app = Waiting()
        protocol, wire = connected(GatheringProtocol, app)
        protocol.data_received(ASKED)
        await turns()
        if stops:
            assert app.stop is not None
            app.stop()
        else:
            app.may_answer.set()
            await turns()
            assert wire.written.endswith(b"12345")
        protocol.connection_lost(None)
        await turns()
        assert app.left == 0


async def test_a_client_that_has_left_already_is_reported_soon() -> None:
    app = Waiting()
    protocol, _ = connected(GatheringProtocol, app)
    protocol.data_received(ASKED)
    protocol.connection_lost(None)  # before the application begins
    await turns()
    assert app.left == 1


async def test_a_waiting_application_receives_the_disconnect() -> None:
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        heard.extend(await asyncio.gather(receive(), receive()))

    protocol, _ = connected(GatheringProtocol, app)
    protocol.data_received(ASKED)
    await turns()
    protocol.connection_lost(None)
    await turns()
    assert heard == [{"type": "http.disconnect"}] * 2


# --- idle connections ------------------------------------------------------------------------------


class Clock:
    """The loop's time and its one timer, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now_s)
        monkeypatch.setattr(loop, "call_later", self._call_later)

    def _call_later(self, after_s: float, call: Callable[[], None]) -> Any:
        entry = (self.now_s + after_s, call)
        self.due.append(entry)

        class Handle:
            def cancel(handle) -> None:  # noqa: N805
                if entry in self.due:
                    self.due.remove(entry)

        return Handle()

    def move(self, to_s: float) -> None:
        while self.due and min(self.due)[0] <= to_s:
            entry = min(self.due)
            self.due.remove(entry)
            self.now_s = entry[0]
            entry[1]()
        self.now_s = to_s


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Waiting()
    protocol, wire = connected(GatheringProtocol, app, keep_alive_s=10)
    with monkeypatch.context() as patched:
        clock = Clock(patched)
        app.may_answer.set()
        protocol.data_received(ASKED)  # answered at 100 s
        await turns()
        clock.move(109.0)
        app.may_answer.clear()
        protocol.data_received(ASKED)  # answered at 150 s
        await turns()
        clock.move(150.0)
        assert not wire.closed
        app.may_answer.set()
        await turns()
        clock.move(159.9)
        assert not wire.closed
        assert len(clock.due) == 1
        clock.move(160.0)
        assert wire.closed
        assert not clock.due


async def test_a_lost_connection_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, _ = connected(GatheringProtocol, sending(*ANSWERS["whole"]))
    with monkeypatch.context() as patched:
        clock = Clock(patched)
        protocol.data_received(ASKED)
        await turns()
        assert len(clock.due) == 1
        protocol.connection_lost(ConnectionResetError())
        assert not clock.due
    assert protocol._idle_since_s < math.inf


# --- memory ----------------------------------------------------------------------------------------


async def test_an_answered_request_leaves_no_work_for_the_garbage_collector() -> None:
    protocol, _ = connected(GatheringProtocol, sending(*ANSWERS["whole"]))
    seen = []
    gc.disable()
    try:
        for _ in range(3):
            protocol.data_received(ASKED)
            await turns()
            seen.append(weakref.ref(protocol.cycle))
        assert [each() is None for each in seen] == [True, True, False]  # the protocol has the last one
    finally:
        gc.enable()
    protocol.connection_lost(None)
