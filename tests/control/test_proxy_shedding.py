"""Requests that Serve's proxy answers by itself: at a real server, over real connections."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from controlplane.runtime.proxy_shedding import (
    MOST_PROBES,
    NOBODY,
    OPEN_PER_MINUTE,
    PROBE_S,
    Decision,
    Probe,
    Probes,
    Shedding,
    SheddingConnection,
)
from controlplane.settings import Settings
from controlplane.traffic import load_shedding
from controlplane.traffic.load_shedding import LoadShedding
from controlplane.traffic.tenants import DEFAULT
from workers.server import whole_bodies
from workers.server.head_limits import Headers
from workers.server.whole_bodies import WholeBodies

GREEDY = b"Bearer greedy"


class Strict(Shedding):
    """Refuses one key whatever the loop does."""

    def decide(self, path: bytes, headers: Headers, now_s: float) -> Decision:
        return Decision("", 2.5 if dict(headers).get(b"authorization") == GREEDY else None)


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(120):
        yield


@asynccontextmanager
async def serving(app: Any, shedding: Shedding) -> AsyncIterator[int]:
    class Connection(SheddingConnection):
        pass

    Connection.shedding = shedding
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, timeout_keep_alive=120)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        for task in shedding._tasks:
            task.cancel()
    assert WholeBodies._held_in_all == 0


@pytest.fixture
def begun() -> list[bytes]:
    """Bodies that came to the application."""
    return []


@pytest.fixture
async def port(begun: list[bytes]) -> AsyncIterator[int]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        begun.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app, Strict(Settings())) as port:
        yield port


def request(body: bytes | None, key: bytes, *more: bytes, chunked: bool = False) -> bytes:
    """None: a GET."""
    lines = [
        b"GET / HTTP/1.1" if body is None else b"POST / HTTP/1.1",
        b"host: x",
        b"authorization: " + key,
        *more,
    ]
    if body is None:
        return b"\r\n".join([*lines, b"", b""])
    if not chunked:
        return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]) + body
    pieces = [body[at : at + 700] for at in range(0, len(body), 700)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b""]) + chunks + b"0\r\n\r\n"


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize("body", [None, b"", b"abc", b"a" * 100_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_who_is_refused_may_go_on_by_the_same_connection(
    port: int, begun: list[bytes], body: bytes | None, chunked: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ids: list[str] = []
    for _ in range(3):
        writer.write(request(body, GREEDY, chunked=chunked))
        status, headers, text = await answer(reader)
        error = json.loads(text)["error"]
        assert (status, error["code"], error["type"]) == (429, "overloaded", "rate_limit_error")
        assert error["details"]["reason"] == "busy"
        assert (headers["retry-after"], headers["content-type"]) == ("3", "application/json")
        ids.append(headers["x-request-id"])
    assert all(ids)
    assert len(set(ids)) == 3
    assert begun == []
    writer.write(request(body, b"Bearer small", chunked=chunked))
    assert (await answer(reader))[0] == 200
    assert begun == [body or b""]
    writer.close()


async def test_who_asks_for_the_end_of_the_connection_gets_it(port: int) -> None:
    for version, header in ((b"1.1", b"connection: close"), (b"1.0", b"x: y")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"abc", GREEDY, header).replace(b"HTTP/1.1", b"HTTP/" + version))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"], await reader.read()) == (429, "close", b"")
        writer.close()


async def test_more_body_than_is_held_ends_the_connection(
    port: int, begun: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_bodies, "LIMIT_BYTES", 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(b"a" * 100_000, GREEDY)[:60_000])
    with suppress(ConnectionResetError):  # what it has not read it resets
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"], await reader.read()) == (429, "close", b"")
    assert begun == []
    writer.close()


@pytest.mark.parametrize("seed", range(8))
async def test_requests_in_a_row_are_answered_in_their_order(
    port: int, begun: list[bytes], seed: int
) -> None:
    """However they are cut: each refused or passed on by its own key."""
    choose = random.Random(seed)
    sent = b""
    keys = [choose.choice([GREEDY, b"Bearer small"]) for _ in range(20)]
    bodies = [choose.choice([None, b"", choose.randbytes(50), choose.randbytes(70_000)]) for _ in keys]
    for key, body in zip(keys, bodies, strict=True):
        sent += request(body, key, chunked=choose.random() < 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    at = 0
    while at < len(sent):
        size = choose.choice([1, 10, 1000, 50_000])
        writer.write(sent[at : at + size])
        await asyncio.sleep(0)
        at += size
    statuses = [(await answer(reader))[0] for _ in keys]
    assert statuses == [429 if key == GREEDY else 200 for key in keys]
    passed = [body or b"" for status, body in zip(statuses, bodies, strict=True) if status == 200]
    assert begun == passed
    writer.close()


async def test_head_gets_no_body(port: int) -> None:
    """Or it would be read as the next answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(None, GREEDY).replace(b"GET", b"HEAD"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 429 ")
    writer.write(request(None, b"Bearer small"))
    assert (await answer(reader))[::2] == (200, b"ok")
    writer.close()


async def test_who_asks_for_a_web_socket_is_refused_as_well(port: int, begun: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(None, GREEDY, b"connection: upgrade", b"upgrade: websocket"))
    status, headers, _ = await answer(reader)
    assert (status, headers["connection"], await reader.read()) == (429, "close", b"")
    assert begun == []
    writer.close()


async def test_who_offers_another_protocol_is_refused_as_others_are(port: int, begun: list[bytes]) -> None:
    """And may ask again on that connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(request(None, GREEDY, b"connection: upgrade", b"upgrade: h2c"))
        status, headers, _ = await answer(reader)
        assert (status, "connection" in headers) == (429, False)
    assert begun == []
    writer.close()


async def test_a_refusal_bears_its_requests_id(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(b"abc", GREEDY, b"X-Request-ID: mine"))
    assert (await answer(reader))[1]["x-request-id"] == "mine"
    writer.close()


async def test_answers_that_begin_are_counted_but_to_who_asks_how_it_is(known: Shedding) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not any(key.startswith("ostinato") for key in scope)
        if scope["path"] == "/fails":
            raise RuntimeError("no answer")
        status = 429 if scope["path"] == "/busy" else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
        for piece in (b"o", b"k"):
            await send({"type": "http.response.body", "body": piece, "more_body": piece == b"o"})

    counted = known._shedding = Counting()
    async with serving(app, known) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path in (b"/", b"/healthz?x=1", b"/-/healthz", b"/v1/models"):
            writer.write(request(None, GREEDY).replace(b"GET /", b"GET " + path))
            assert (await answer(reader))[0] == 200
        assert (counted.answers, counted.refusals) == (2, 0)
        writer.write(request(None, GREEDY).replace(b"GET /", b"GET /busy"))
        assert (await answer(reader))[0] == 429
        assert (counted.answers, counted.refusals) == (3, 1)
        writer.write(request(None, GREEDY).replace(b"GET /", b"GET /fails"))
        await reader.read()
        writer.close()
    assert counted.answers == 3


UPGRADE = (
    b"connection: upgrade",
    b"upgrade: websocket",
    b"sec-websocket-version: 13",
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


async def test_who_goes_on_with_another_protocol_is_left_out(known: Shedding) -> None:
    """Else it would look as if gateways did not come on, or as if they did more than they do."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not any(key.startswith("ostinato") for key in scope)
        await send({"type": "websocket.close"})

    counted = known._shedding = Counting()
    async with serving(app, known) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(None, GREEDY, *UPGRADE))
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
        writer.close()
    assert (counted._passed, counted.answers) == (0, 0)


@pytest.mark.parametrize("key", [GREEDY, b"Bearer small"])
async def test_nobody_goes_on_with_another_protocol_in_the_answer_before(port: int, key: bytes) -> None:
    """Whether it would be refused or not: the answers before it are the connection's last."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(2 * request(b"abc", b"Bearer small") + request(None, key, *UPGRADE))
    for _ in range(2):
        assert (await answer(reader))[::2] == (200, b"ok")
    assert await reader.read() == b""
    writer.close()


async def test_who_asks_for_a_protocol_that_nobody_speaks_is_answered_in_its_turn(port: int) -> None:
    """As what it is beside: a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    h2c = request(None, GREEDY, b"connection: upgrade", b"upgrade: h2c")
    writer.write(request(b"abc", b"Bearer small") + h2c)
    assert [(await answer(reader))[0] for _ in range(2)] == [200, 429]
    writer.close()


async def test_openais_client_is_told(port: int) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}", api_key="greedy", max_retries=0)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.models.list()
    assert caught.value.code == "overloaded"
    await client.close()


async def app_saying(status: int, scope: Any, receive: Any, send: Any) -> None:
    """As gateways answer: after the request was read, and nothing more is to be read."""
    assert scope["path"] == "/healthz"
    assert (await receive())["type"] == "http.request"
    leaves = asyncio.ensure_future(receive())
    await asyncio.sleep(0.05)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})
    assert not leaves.done()
    leaves.cancel()


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def ended(probe: Probe) -> float:
    while not probe.is_over():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return probe.late_s()


@pytest.mark.parametrize(
    ("status", "least_s"), [(200, 1.05), (429, 1.05), (408, 1.05), (503, 0.0), (404, 0.0)]
)
async def test_a_look_takes_as_long_as_a_request(status: int, least_s: float) -> None:
    found_s = await ended(Probe(partial(app_saying, status), now_s() - 1.0))
    assert found_s >= least_s
    assert (found_s == 0.0) == (least_s == 0.0)


async def test_a_look_under_way_is_as_late_as_it_is_by_now() -> None:
    """Also one that is given up, of an application that does not let itself be cancelled."""

    async def stubborn(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            await send({"type": "http.response.start", "status": 503, "headers": []})

    probe = Probe(stubborn, now_s() - PROBE_S + 1.0)
    await asyncio.sleep(0)
    assert not probe.is_over()
    assert probe.late_s() >= PROBE_S - 1.0
    probe = Probe(stubborn, now_s() - PROBE_S - 1.0)
    await asyncio.sleep(0)
    assert probe.late_s() > PROBE_S
    assert probe.is_over()


async def test_a_look_that_fails_says_nothing() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no gateway")

    assert await ended(Probe(broken, now_s() - 1.0)) == 0.0


async def test_one_gateway_that_hangs_is_no_crowd() -> None:
    """Every second request goes to it, and is passed by another."""
    asked, left = 0, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked, left
        asked += 1
        if asked % 2:
            try:
                await asyncio.sleep(1000.0)
            finally:
                left += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})

    probes = Probes(app)
    for _ in range(3):
        probes.send(now_s() - 3.0)  # which hangs
        probes.send(now_s())
        await asyncio.sleep(0)
        assert probes.late_s() < 3.0
    await asyncio.sleep(0)
    assert (asked, left) == (6, 3)


async def test_a_crowd_is_as_late_as_its_first() -> None:
    """However many are sent beside it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1000.0)

    probes = Probes(app)
    for ago_s in (3.0, 2.0, 1.0, 0.5, 0.4):
        probes.send(now_s() - ago_s)
    await asyncio.sleep(0)
    assert probes.late_s() >= 3.0
    assert len(probes._under_way) == MOST_PROBES
    for probe in probes._under_way:
        probe.give_up()


class Counting(LoadShedding):
    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.answers = self.refusals = 0

    def answer(self, name: str, is_refusal: bool = False) -> None:
        assert name == "greedy"
        self.answers += 1
        self.refusals += is_refusal

    def arrive(self, name: str, weight: float, now_s: float) -> float | None:
        self.asked[name] += 1
        return None


def settings_of(folder: Path, **weights: float) -> Settings:
    file = folder / "tenants.json"
    tenants = [
        {"name": name, "weight": weight, "keys": [sha256(name.encode()).hexdigest()]}
        for name, weight in weights.items()
    ]
    file.write_text(json.dumps({"tenants": tenants}))
    return Settings(api_key="own", tenants=str(file))


@pytest.fixture
def known(tmp_path: Path) -> Shedding:
    return Shedding(settings_of(tmp_path, small=1.0, greedy=3.0))


def test_tenants_are_known_by_their_keys(known: Shedding) -> None:
    def who(*headers: tuple[bytes, bytes]) -> Any:
        return known.tenant_of(headers)

    assert (who((b"authorization", GREEDY)).name, who((b"authorization", GREEDY)).weight) == ("greedy", 3.0)
    assert who((b"host", b"x"), (b"authorization", b"Bearer own")).is_admin
    for other in (b"Bearer else", b"Bearer ", b"", b"greedy \xff"):
        assert who((b"authorization", other)) is NOBODY
    assert who((b"host", b"x")) is NOBODY
    twice = ((b"authorization", b"Bearer else"), (b"authorization", GREEDY))  # gateways take the last
    assert who(*twice).name == "greedy"
    assert Shedding(Settings(api_key="", tenants="")).tenant_of(()) is DEFAULT


def test_tenants_that_cannot_be_read_leave_the_installations_key(tmp_path: Path) -> None:
    shedding = Shedding(Settings(api_key="own", tenants=str(tmp_path / "absent.yaml")))
    assert shedding.tenant_of([(b"authorization", b"Bearer own")]).is_admin
    assert shedding.tenant_of([(b"authorization", GREEDY)]) is NOBODY


def test_what_anybody_may_ask_is_bounded(known: Shedding) -> None:
    """Beyond that it counts as asked by nobody who is known."""
    known._shedding = Counting()
    for number in range(2 * int(OPEN_PER_MINUTE)):
        assert known.decide(b"/healthz?x=1", (), number * 1e-6) == (None, None)
        assert known.decide(b"/-/healthz", (), number * 1e-6) == (None, None)
    assert known._shedding.asked == Counter({"": int(OPEN_PER_MINUTE)})
    known.decide(b"/-/other", [(b"authorization", GREEDY)], 1.0)
    assert known._shedding.asked["greedy"] == 1


def test_it_can_be_turned_off() -> None:
    shedding = Shedding(Settings(proxy_sheds=False))
    shedding._shedding = Counting()
    assert shedding.decide(b"/v1/models", (), 1.0) == (None, None)
    assert not shedding._shedding.asked


async def test_a_loop_with_too_much_refuses_the_greedy_and_not_its_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it does: how soon is the machine's affair."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/":
            time.sleep(0.01)  # noqa: ASYNC251  # 64 at once are late by more than LATE_S, on any machine
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    until_s = time.monotonic() + 100.0
    counts: dict[str, Counter[int]] = {"greedy": Counter(), "small": Counter(), "probe": Counter()}

    async def ask(port: int, who: str, asked: bytes, pause_s: float = 0.0) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while counts["greedy"][429] < 100 and time.monotonic() < until_s:
            writer.write(asked)
            counts[who][(await answer(reader))[0]] += 1
            await asyncio.sleep(pause_s)
        writer.close()

    async def all_ask(port: int) -> None:
        probe = request(None, GREEDY).replace(b"GET /", b"GET /healthz")
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(port, "small", request(None, b"Bearer small"), 0.5))
            group.create_task(ask(port, "probe", probe, 0.2))
            for _ in range(64):
                group.create_task(ask(port, "greedy", request(b"abc", GREEDY)))

    monkeypatch.setattr(load_shedding, "LEAST_PER_S", 10.0)  # as a busy machine may do no more
    shedding = Shedding(settings_of(tmp_path, small=1.0, greedy=1.0))
    async with serving(slow, shedding) as port:
        await asyncio.to_thread(asyncio.run, all_ask(port))  # a loop of their own
    assert set(counts["small"]) == set(counts["probe"]) == {200}
    assert set(counts["greedy"]) == {200, 429}
