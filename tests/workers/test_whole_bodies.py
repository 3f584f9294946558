"""Bodies at a server like Serve's proxy: a request is there when its body is."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from workers.server import whole_bodies
from workers.server.whole_bodies import WholeBodies


class Application:
    """Answers with the number of bytes that came, and keeps them."""

    def __init__(self) -> None:
        self.begun = 0
        self.bodies: list[bytes] = []
        self.headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        self.headers = scope["headers"]
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        answer = b"%d" % len(body)
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def port(application: Application) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=WholeBodies, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await serving
    assert WholeBodies._held_in_all == 0


def post(body: bytes, *more: str) -> bytes:
    lines = ["POST / HTTP/1.1", "host: x", *more]
    if "transfer-encoding: chunked" not in more:
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return "\r\n".join([*lines, "", ""]).encode() + chunks + b"0\r\n\r\n"


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return await reader.readexactly(int(length.split(b":")[1]))


async def test_it_begins_when_its_body_is_there(application: Application, port: int) -> None:
    slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)
    quick, quick_writer = await asyncio.open_connection("127.0.0.1", port)
    whole = post(b"abcdef")
    slow_writer.write(whole[:-1])
    await slow_writer.drain()
    for _ in range(3):  # the slow one's bytes came before these
        quick_writer.write(post(b"xy"))
        assert await answer(quick) == b"2"
    assert application.begun == 3
    slow_writer.write(whole[-1:])
    assert await answer(slow) == b"6"
    assert application.bodies[-1] == b"abcdef"
    slow_writer.close()
    quick_writer.close()


@pytest.mark.parametrize("seed", range(5))
async def test_requests_in_a_row_however_they_are_cut(application: Application, port: int, seed: int) -> None:
    choose = random.Random(seed)
    bodies = [choose.randbytes(choose.choice([0, 1, 100, 70_000])) for _ in range(12)]
    framings: list[tuple[str, ...]] = [(), ("transfer-encoding: chunked",), ("content-type: text/plain",)]
    sent = b"".join(post(body, *choose.choice(framings)) for body in bodies)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    at = 0
    while at < len(sent):
        size = choose.choice([1, 10, 1000, 50_000])
        writer.write(sent[at : at + size])
        await asyncio.sleep(0)
        at += size
    assert [await answer(reader) for _ in bodies] == [b"%d" % len(body) for body in bodies]
    assert application.bodies == bodies
    writer.close()


@pytest.mark.parametrize("begun", [post(b"abc")[:-1], post(b"abc", "transfer-encoding: chunked")[:-2]])
async def test_one_that_does_not_come_is_told_so_and_nobody_else(
    application: Application, port: int, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_bodies, "LIMIT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "body_too_slow"
    assert application.begun == 0
    writer.close()


async def test_one_that_is_too_large_goes_on_to_who_refuses_it(
    application: Application, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_bodies, "LIMIT_BYTES", 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    whole = post(b"a" * 100_000)
    writer.write(whole[:60_000])
    while not application.begun:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    writer.write(whole[60_000:])
    assert await answer(reader) == b"100000"
    writer.close()


async def test_one_that_asks_whether_to_go_on_may(application: Application, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head, _, body = post(b"abc", "expect: 100-continue").partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert await answer(reader) == b"3"
    assert application.bodies == [b"abc"]
    writer.close()


async def test_trailers_are_no_headers(application: Application, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    whole = post(b"abc", "transfer-encoding: chunked")
    writer.write(whole[:-2] + b"authorization: Bearer other\r\n\r\n")
    assert await answer(reader) == b"3"
    assert [name for name, _ in application.headers] == [b"host", b"transfer-encoding"]
    writer.close()


async def test_one_that_leaves_holds_nothing(application: Application, port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(b"a" * 5000)[:-1])
    await writer.drain()
    while WholeBodies._held_in_all < 4000:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    writer.close()
    while WholeBodies._held_in_all:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert application.begun == 0
