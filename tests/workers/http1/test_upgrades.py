"""Requests that offer another protocol with their body, as the JDK's client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from testkit.workers.http1_connections import listening

# The bytes that the JDK 17's client sends.
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
SIZED = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + OFFER + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: x\r\n"
    + OFFER
    + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
)
BODILESS = b"GET /echo HTTP/1.1\r\nHost: x\r\n" + OFFER + b"\r\n"
PLAIN = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nlast"


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    names = sorted(name for name, _ in scope["headers"])
    told = b"%b %b %b" % (scope["method"].encode(), body, b",".join(names))
    headers = [(b"content-length", b"%d" % len(told))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": told})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with asyncio.timeout(60), listening(_echo) as port:
        yield port


async def answers(port: int, *pieces: bytes, count: int) -> list[bytes]:
    """The bodies that come back on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        found = []
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        for _ in range(count):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            found.append(await reader.readexactly(int(length.partition(b":")[2])))
        return found
    finally:
        writer.close()


@pytest.mark.parametrize("offering", [SIZED, CHUNKED])
async def test_a_body_behind_an_offer_is_read(port: int, offering: bytes) -> None:
    (told,) = await answers(port, offering, count=1)
    assert told.startswith(b"POST hello ")
    assert b"upgrade" not in told
    assert b"http2-settings" not in told


async def test_a_request_without_a_body_is_answered(port: int) -> None:
    (told,) = await answers(port, BODILESS, count=1)
    assert told.startswith(b"GET  host")


async def test_an_upgrade_may_come_byte_by_byte(port: int) -> None:
    pieces = [SIZED[i : i + 1] for i in range(len(SIZED))]
    (told,) = await answers(port, *pieces, count=1)
    assert told.startswith(b"POST hello ")


async def test_the_connection_goes_on(port: int) -> None:
    """The rule also holds when the next request came with the first."""
    found = await answers(port, SIZED + PLAIN, SIZED, CHUNKED + PLAIN, count=5)
    assert [told.split()[1] for told in found] == [b"hello", b"last", b"hello", b"hello", b"last"]
