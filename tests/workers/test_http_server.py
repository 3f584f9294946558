"""A worker's door: a real socket before a real engine or a probe."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from testkit.doors import Held, opened
from testkit.engine_configs import echo_config
from workers import request_headers
from workers.messages import EngineCall, VariantRef, WorkerReport
from workers.server import http_server as door_module
from workers.server.http_server import Door
from workers.server.worker import Worker

CONFIG = echo_config()
TEXT = "/v1/completions"
V = VariantRef('naïve "v"\n', 7, "/folder/é")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(CONFIG, "127.0.0.1", node_ip="10.0.0.1")
    await worker.start()
    await worker.open_door("127.0.0.1")
    yield worker
    await worker.close()


async def post(report: WorkerReport, headers: dict[str, str], **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{report.address}", trust_env=False) as http:
        return await http.post(TEXT, json={"model": "b", "prompt": "a b", **body}, headers=headers)


async def test_a_caller_with_the_secret_is_answered(worker: Worker) -> None:
    report = await worker.report()
    reply = await post(report, request_headers.request_headers(report.secret, None))
    assert reply.json()["choices"][0]["text"] == "a b"
    assert request_headers.REFUSED not in reply.headers


async def test_a_long_request_is_read_whole(worker: Worker) -> None:
    report = await worker.report()
    long = "a" * 300_000
    reply = await post(report, request_headers.request_headers(report.secret, None), prompt=long)
    assert reply.json()["choices"][0]["text"] == long


@pytest.mark.parametrize("secret", [None, "", "0" * 64])
async def test_a_caller_without_the_secret_is_refused(worker: Worker, secret: str | None) -> None:
    headers = {} if secret is None else {request_headers.SECRET: secret}
    reply = await post(await worker.report(), headers | {request_headers.VARIANT: '["v", 1, "/a"]'})
    assert reply.status_code == 401
    assert reply.headers[request_headers.REFUSED] == "1"
    assert (await worker.report()).variants == ()


async def test_every_answer_carries_the_worker_s_proof(worker: Worker) -> None:
    """The answers include a refusal, and one of the protocol itself."""
    report = await worker.report()
    known = await post(report, request_headers.request_headers(report.secret, None))
    unknown = await post(report, {})
    port = report.address.split(":")[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(b"this is no HTTP\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    assert len(report.proof) == 32
    assert known.headers[request_headers.PROOF] == unknown.headers[request_headers.PROOF] == report.proof
    assert f"{request_headers.PROOF}: {report.proof}" in head
    assert report.proof not in repr(report)
    assert report.proof != Door(worker.answer).proof


async def test_secrets_are_of_each_worker_and_not_printed(worker: Worker) -> None:
    report = await worker.report()
    assert len(report.secret) == 64
    assert report.secret != Door(worker.answer).secret
    assert report.secret not in repr(report)


async def test_a_variant_comes_with_its_request(worker: Worker) -> None:
    report = await worker.report()
    assert (await post(report, request_headers.request_headers(report.secret, V))).status_code == 200
    assert (await worker.report()).variants == (V.name,)


async def test_a_variant_that_does_not_fit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(variant: VariantRef) -> None:
        raise ValueError("too wide")

    monkeypatch.setattr(worker.engine, "ensure_variant", refuse)
    report = await worker.report()
    reply = await post(report, request_headers.request_headers(report.secret, V))
    assert reply.status_code == 422
    assert reply.json() == {"error": {"message": "too wide", "code": "adapter_mismatch"}}
    assert request_headers.REFUSED not in reply.headers


async def test_the_server_listens_at_its_reported_address() -> None:
    for host, reached in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "10.0.0.1")):
        door = Door(Held())
        await door.open(host, "10.0.0.1")
        assert door.address.rpartition(":")[0] == reached
        await door.close()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_is_a_disconnect(streams: bool) -> None:
    app = Held(streams)
    async with opened(app) as door, asyncio.timeout(90):
        host, port = door.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        secret = f"{request_headers.SECRET}: {door.secret}"
        head = f"POST / HTTP/1.1\r\nhost: x\r\n{secret}\r\ncontent-length: 0\r\n\r\n"
        writer.write(head.encode())
        await app.arrived.wait()
        assert not app.left.is_set()
        writer.close()
        await app.left.wait()


async def test_a_closing_server_ends_its_requests_and_takes_no_others() -> None:
    app = Held()
    async with opened(app) as door, asyncio.timeout(90):
        url, headers = f"http://{door.address}/", request_headers.request_headers(door.secret, None)
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(url, headers={})  # a connection that is kept
            running = asyncio.create_task(http.post(url, headers=headers))
            await app.arrived.wait()
            closing = asyncio.create_task(door.close())
            await asyncio.sleep(0)
            late = await http.post(url, headers=headers)
            assert (late.status_code, late.headers[request_headers.REFUSED]) == (503, "1")
            assert door.address == ""
            assert not closing.done()
            app.may_answer.set()
            assert (await running).content == b"late"
            await closing
            with pytest.raises(httpx.ConnectError):
                await http.post(url, headers=headers)
    assert app.asked == 1


async def test_a_closing_server_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "DRAIN_S", 0.05)
    app = Held()
    async with opened(app) as door, asyncio.timeout(90), httpx.AsyncClient(trust_env=False) as http:
        headers = request_headers.request_headers(door.secret, None)
        running = asyncio.create_task(http.post(f"http://{door.address}/", headers=headers))
        await app.arrived.wait()
        await door.close()
        app.may_answer.set()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_server_that_ended_makes_the_worker_ill(worker: Worker) -> None:
    await worker.check_health()
    door = worker._door
    assert door is not None
    await door._listener.close(grace_s=0.0)
    with pytest.raises(RuntimeError, match="HTTP server ended"):
        await worker.check_health()


async def test_a_worker_without_a_server_reports_no_address() -> None:
    worker = Worker(CONFIG, "127.0.0.1")
    await worker.start()
    report = await worker.report()
    assert (report.address, report.secret) == ("", "")
    assert report.max_ongoing_requests == 64
    assert json.loads((await worker.call(_call())).body)["choices"]
    await worker.close()


def _call() -> EngineCall:
    return EngineCall(TEXT, b'{"model": "b", "prompt": "x"}')
