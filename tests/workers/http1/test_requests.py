"""Requests as applications see them: as with uvicorn, and the same however they were split. A request that
can be read in two ways is refused (request smuggling)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.workers.http1_connections import by_uvicorn, connected, listening, part, start, turns
from workers.asgi import DIRECT, AsgiApp

SIZED = b"POST /v1/x?a=b HTTP/1.1\r\nHost: x\r\nX-A: \xe9\r\nContent-Length: 14\r\n\r\n" + b'{"model": "m"}'
CHUNKED = (
    b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=1\r\n world\r\n0\r\nX-Trailer: t\r\n\r\n"
)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WELL_FORMED = [
    SIZED,
    GET,
    b"POST /empty HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"GET /%41%C3%A4/./b%2fc?q=%41&q=#fragment HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other:8000/absolute?x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE //twice//slashed HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nx-a: 2\r\n\r\n",
    b"PATCH /v1/x HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nX-Spaces:  \t a  b \t\r\nContent-Length: 1\r\n\r\n1",
    b"HEAD /v1/x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: x\r\nCookie: a=b; c=d\r\nConnection: keep-alive\r\n\r\n",
]


class Keeping:
    """Keeps each request's scope and the messages that it was given, and answers with its number."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.scopes.append({key: value for key, value in scope.items() if key != DIRECT})
        self.bodies.append(body)
        text = b"%d" % len(self.bodies)
        await send(start((b"content-length", b"%d" % len(text))))
        await send(part(text))


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


async def answer(reader: asyncio.StreamReader, is_head: bool = False) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return b"" if is_head else await reader.readexactly(int(length.partition(b":")[2]))


async def asked_of(port: int, requests: list[bytes]) -> list[Any]:
    """Send the requests, one after the other, on one connection; returns the client's address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number, request in enumerate(requests, start=1):
        writer.write(request)
        is_head = request.startswith(b"HEAD")
        assert await answer(reader, is_head) == (b"" if is_head else b"%d" % number)
    address = writer.get_extra_info("sockname")
    writer.close()
    return list(address)


async def test_scopes_and_bodies_are_those_of_uvicorn() -> None:
    ours, theirs = Keeping(), Keeping()
    async with listening(ours) as port, by_uvicorn(theirs) as other:
        clients = [await asked_of(port, WELL_FORMED), await asked_of(other, WELL_FORMED)]
    assert ours.bodies == theirs.bodies
    for app, client, at in ((ours, clients[0], port), (theirs, clients[1], other)):
        for scope in app.scopes:
            assert list(scope.pop("client")) == client
            assert list(scope.pop("server")) == ["127.0.0.1", at]
    assert ours.scopes == theirs.scopes


async def test_header_names_are_lower_case_and_values_are_bytes() -> None:
    app = Keeping()
    connection, _ = connected(app)
    connection.data_received(SIZED)
    await turns()
    assert app.scopes[0]["headers"] == [(b"host", b"x"), (b"x-a", b"\xe9"), (b"content-length", b"14")]


async def read(app: AsgiApp, *pieces: bytes) -> bytes:
    connection, wire = connected(app)
    for piece in pieces:
        connection.data_received(piece)
    await turns(40)
    return wire.written


STREAM = SIZED + CHUNKED + GET + CHUNKED + SIZED


@settings(max_examples=100)
@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=12, unique=True))
def test_requests_are_the_same_however_they_are_split(cuts: list[int]) -> None:
    ends = [*sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    whole, split = Keeping(), Keeping()

    async def both() -> tuple[bytes, bytes]:
        return await read(whole, STREAM), await read(split, *pieces)

    written, again = asyncio.run(both())
    assert written == again
    assert len(whole.bodies) == 5
    assert (whole.scopes, whole.bodies) == (split.scopes, split.bodies)


@pytest.mark.parametrize("request_", [SIZED, CHUNKED, GET], ids=["sized", "chunked", "bodiless"])
async def test_a_request_may_come_byte_by_byte(request_: bytes) -> None:
    whole, split = Keeping(), Keeping()
    await read(whole, request_)
    await read(split, *(request_[i : i + 1] for i in range(len(request_))))
    assert (whole.scopes, whole.bodies) == (split.scopes, split.bodies)
    assert len(split.bodies) == 1


async def test_headers_behind_a_body_are_none_of_its_request() -> None:
    """Otherwise a client could override headers that a proxy checks (RFC 9110, 6.5.1)."""
    app = Keeping()
    await read(app, CHUNKED.replace(b"X-Trailer: t", b"Host: y\r\nExpect: 100-continue"))
    (scope,) = app.scopes
    assert scope["headers"] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]


def posted(*lines: bytes, body: bytes = b"0\r\n\r\n") -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"Host: x", *lines, b"", body])


AMBIGUOUS = {
    "two lengths": posted(b"Content-Length: 5", b"Content-Length: 6", body=b"hello!"),
    "the same length twice": posted(b"Content-Length: 5", b"Content-Length: 5", body=b"hello"),
    "a list of lengths": posted(b"Content-Length: 5, 5", body=b"hello"),
    "length and chunks": posted(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "chunks and length": posted(b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    "signed length": posted(b"Content-Length: +5", body=b"hello"),
    "hexadecimal length": posted(b"Content-Length: 0x5", body=b"hello"),
    "negative length": posted(b"Content-Length: -1"),
    "a length too long to count": posted(b"Content-Length: 99999999999999999999999"),
    "another coding last": posted(b"Transfer-Encoding: chunked, identity"),
    "another coding": posted(b"Transfer-Encoding: identity"),
    "a coding that looks like chunks": posted(b"Transfer-Encoding: xchunked"),
    "two codings": posted(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    "space before the colon": posted(b"Transfer-Encoding : chunked"),
    "a line end in a name": posted(b"Transfer\n-Encoding: chunked"),
    "a folded header": posted(b"Transfer-Encoding:", b" chunked"),
    "bare line feeds": posted(b"Transfer-Encoding: chunked").replace(b"\r\n", b"\n"),
    "a NUL in a value": posted(b"X-A: \0"),
    "a chunk's size that is none": posted(b"Transfer-Encoding: chunked", body=b"zz\r\nhello\r\n0\r\n\r\n"),
    "a chunk longer than its size": posted(b"Transfer-Encoding: chunked", body=b"3\r\nhello\r\n0\r\n\r\n"),
    "a signed chunk's size": posted(b"Transfer-Encoding: chunked", body=b"+5\r\nhello\r\n0\r\n\r\n"),
    "a tunnel": b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "another version": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
}
OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("offer", [b"", OFFER], ids=["plain", "offering"])
@pytest.mark.parametrize("bad", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_a_request_that_can_be_read_in_two_ways_is_refused(bad: bytes, offer: bytes) -> None:
    """Nor is what follows it read as a request."""
    app = Keeping()
    connection, wire = connected(app)
    connection.data_received(bad.replace(b"Host", offer + b"Host") + GET)
    await turns()
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 400 ")
    assert wire.written.count(b"HTTP/1.1") == 1
    assert app.bodies == []


async def test_data_behind_the_last_request_of_a_connection_is_not_read() -> None:
    app = Keeping()
    connection, wire = connected(app)
    connection.data_received(GET.replace(b"Host", b"Connection: close\r\nHost") + SIZED)
    await turns()
    assert app.bodies == [b""]
    assert wire.closed


async def test_an_invalid_request_behind_another_ends_the_connection_only() -> None:
    """Nothing is written into the answer to the first."""
    goes_on = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"4")))
        await send(part(b"ab", more=True))
        await goes_on.wait()

    connection, wire = connected(slow)
    connection.data_received(GET)
    await turns()
    connection.data_received(b"nonsense\r\n\r\n")
    assert wire.closed
    assert wire.written.endswith(b"\r\n\r\nab")
    goes_on.set()
