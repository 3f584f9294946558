"""Requests that a gateway refuses before anything is done for them: at a real server and its connections."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import uvicorn

from controlplane.api.early_refusal import (
    OPEN_PER_MINUTE,
    UNKNOWN_TENANT,
    Decision,
    EarlyRefusal,
    EarlyRefusals,
    Headers,
    lateness_s,
)
from controlplane.gateway.tenants_file import tenants_of
from controlplane.runtime.replica_http import connections_of
from controlplane.settings import Settings
from controlplane.traffic import load_shedding
from controlplane.traffic.load_shedding import LoadShedding
from controlplane.traffic.tenants import DEFAULT
from workers.asgi import DIRECT

GREEDY = b"Bearer greedy"


def early_of(settings: Settings, counts: Counter[str] | None = None) -> EarlyRefusal:
    tenants, counts = tenants_of(settings), Counter() if counts is None else counts

    def count(name: str, number: int) -> None:
        counts[name] += number

    return EarlyRefusal(settings, lambda: tenants, count)


class Strict(EarlyRefusal):
    """Refuses one key whatever the loop does."""

    def decide(self, path: str, headers: Headers, now_s: float) -> Decision:
        return Decision("", 2.5 if dict(headers).get(b"authorization") == GREEDY else None)


@pytest.fixture(autouse=True)
async def _bound() -> AsyncIterator[None]:
    async with asyncio.timeout(120):
        yield


@asynccontextmanager
async def serving(app: Any, early: EarlyRefusal) -> AsyncIterator[int]:
    """The order of layers in a gateway's replica."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        EarlyRefusals(app, early),
        http=cast(Any, connections_of(early)),
        lifespan="off",
        log_config=None,
        interface="asgi3",
        timeout_keep_alive=120,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(early.watch())
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running
        watching.cancel()


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

    settings = Settings()
    async with serving(app, Strict(settings, lambda: tenants_of(settings), lambda *_: None)) as port:
        yield port


def request(body: bytes | None, key: bytes, *more: bytes, path: bytes = b"/") -> bytes:
    """None: a GET."""
    first = b"GET %b HTTP/1.1" if body is None else b"POST %b HTTP/1.1"
    lines = [first % path, b"host: x", b"authorization: " + key, *more]
    if body is None:
        return b"\r\n".join([*lines, b"", b""])
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", b""]) + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


PLAIN: tuple[bytes, ...] = ()
OFFERING = (b"connection: upgrade", b"upgrade: h2c")
INVITED = (b"expect: 100-continue",)


@pytest.mark.parametrize("more", [PLAIN, OFFERING, INVITED], ids=["plain", "offering", "invited"])
async def test_a_refused_client_may_go_on_by_the_same_connection(
    port: int, begun: list[bytes], more: tuple[bytes, ...]
) -> None:
    """The connection ends if the client was not told to send the body that it announced."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in range(3):
        writer.write(request(b"no" * 700, GREEDY, *more))
        status, headers, body = await answer(reader)
        assert (status, headers["retry-after"]) == (429, "3")
        assert json.loads(body)["error"]["details"] == {"reason": "busy"}
        if more is INVITED:
            assert headers["connection"] == "close"
            break
        writer.write(request(b"yes %d" % number, b"Bearer else"))
        assert (await answer(reader))[2] == b"ok"
    assert begun == ([] if more is INVITED else [b"yes 0", b"yes 1", b"yes 2"])
    writer.close()


async def test_a_client_that_asks_for_the_end_of_the_connection_gets_it(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(b"abc", GREEDY, b"connection: close"))
    status, headers, _ = await answer(reader)
    assert (status, headers["connection"], await reader.read()) == (429, "close", b"")
    writer.close()


async def test_requests_in_a_row_are_answered_in_their_order(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    keys = [b"Bearer else", GREEDY, GREEDY, b"Bearer else", GREEDY]
    writer.write(b"".join(request(b"x" * 50, key) for key in keys))
    assert [(await answer(reader))[0] for _ in keys] == [429 if key == GREEDY else 200 for key in keys]
    writer.close()


async def test_head_gets_no_body(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(None, GREEDY, b"connection: close").replace(b"GET /", b"HEAD /"))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert body == b""
    writer.close()


async def test_a_refusal_bears_its_requests_id(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(b"abc", GREEDY, b"X-Request-ID: mine"))
    assert (await answer(reader))[1]["x-request-id"] == "mine"
    writer.close()


async def test_openai_s_client_raises_its_rate_limit_error(port: int) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}", api_key="greedy", max_retries=0)
    with pytest.raises(openai.RateLimitError, match="the gateway gets more requests than it can handle"):
        await client.completions.create(model="m", prompt="p")
    await client.close()


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
def known(tmp_path: Path) -> EarlyRefusal:
    return early_of(settings_of(tmp_path, small=1.0, greedy=3.0))


async def test_answers_are_counted_when_they_begin_but_those_to_probes(known: EarlyRefusal) -> None:
    """The answer goes by messages of ASGI, and without them."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not any(key.startswith("ostinato") for key in scope if key != DIRECT)
        if scope["path"] == "/fails":
            raise RuntimeError("no answer")
        status, headers = 429 if scope["path"] == "/busy" else 200, [(b"content-length", b"2")]
        if scope["path"] == "/direct":
            await receive()
            assert scope[DIRECT].answer(status, headers, b"ok")
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in (b"o", b"k"):
            await send({"type": "http.response.body", "body": piece, "more_body": piece == b"o"})

    counted = known._shedding = Counting()
    async with serving(app, known) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path in (b"/", b"/healthz?x=1", b"/-/healthz", b"/direct"):
            writer.write(request(None, GREEDY, path=path))
            assert (await answer(reader))[0] == 200
        assert (counted.answers, counted.refusals) == (2, 0)
        writer.write(request(None, GREEDY, path=b"/busy"))
        assert (await answer(reader))[0] == 429
        assert (counted.answers, counted.refusals) == (3, 1)
        writer.write(request(None, GREEDY, path=b"/fails"))
        assert (await reader.read()).startswith(b"HTTP/1.1 500")
        writer.close()
    assert counted.answers == 3


def test_tenants_are_known_by_their_keys(known: EarlyRefusal) -> None:
    def who(*headers: tuple[bytes, bytes]) -> Any:
        return known.tenant_of(headers)

    assert (who((b"authorization", GREEDY)).name, who((b"authorization", GREEDY)).weight) == ("greedy", 3.0)
    assert who((b"host", b"x"), (b"authorization", b"Bearer own")).is_admin
    for other in (b"Bearer else", b"Bearer ", b"", b"greedy \xff"):
        assert who((b"authorization", other)) is UNKNOWN_TENANT
    assert who((b"host", b"x")) is UNKNOWN_TENANT
    twice = ((b"authorization", b"Bearer else"), (b"authorization", GREEDY))  # the guard takes the last
    assert who(*twice).name == "greedy"
    assert early_of(Settings(api_key="", tenants="")).tenant_of(()) is DEFAULT


def test_open_paths_are_bounded(known: EarlyRefusal) -> None:
    """Beyond that it counts as a request without a known key."""
    known._shedding = Counting()
    for number in range(2 * int(OPEN_PER_MINUTE)):
        assert known.decide("/healthz", (), number * 1e-6) == (None, None)
        assert known.decide("/-/healthz", (), number * 1e-6) == (None, None)
    assert known._shedding.asked == Counter({"": int(OPEN_PER_MINUTE)})
    known.decide("/-/other", [(b"authorization", GREEDY)], 1.0)
    assert known._shedding.asked["greedy"] == 1


def test_load_shedding_can_be_turned_off() -> None:
    early = early_of(Settings(sheds_load=False))
    early._shedding = Counting()
    assert early.decide("/v1/models", (), 1.0) == (None, None)
    assert not early._shedding.asked


async def test_a_loop_is_as_late_as_what_it_does_meanwhile() -> None:
    """A request that came when the loop was busy would wait for it; one that finds it idle does not."""
    loop = asyncio.get_running_loop()
    looking = asyncio.create_task(lateness_s(loop.time() + 0.01))
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251
    assert await looking >= 0.2


async def test_a_loop_with_too_much_refuses_the_greedy_and_not_its_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waits until it does; the time depends on the machine."""

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
        probe = request(None, GREEDY, path=b"/healthz")
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(port, "small", request(None, b"Bearer small"), 0.5))
            group.create_task(ask(port, "probe", probe, 0.2))
            for _ in range(64):
                group.create_task(ask(port, "greedy", request(b"abc", GREEDY)))

    monkeypatch.setattr(load_shedding, "LEAST_PER_S", 10.0)  # a busy machine may do less
    refused: Counter[str] = Counter()
    early = early_of(settings_of(tmp_path, small=1.0, greedy=1.0), refused)
    async with serving(slow, early) as port:
        await asyncio.to_thread(asyncio.run, all_ask(port))  # a loop of their own
    assert set(counts["small"]) == set(counts["probe"]) == {200}
    assert set(counts["greedy"]) == {200, 429}
    assert refused.keys() == {"greedy"}
