"""A worker with the echo engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest

from profiler.errors import CheckpointError
from testkit.engine_configs import echo_config
from workers.asgi import Message
from workers.bus.faults import LoadFailed
from workers.messages import EngineCall, EngineHead, VariantRef
from workers.server.http_server import respond
from workers.server.worker import Worker

CONFIG = echo_config()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
V = VariantRef("v", 7, "/a")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(CONFIG, "127.0.0.1")
    await worker.start()
    yield worker
    await worker.close()


def ask(path: str, variant: VariantRef | None = None, **body: Any) -> EngineCall:
    return EngineCall(path, json.dumps({"model": "b", **body}).encode(), variant)


async def test_both_shapes_of_requests_are_answered(worker: Worker) -> None:
    chat = json.loads((await worker.call(ask(CHAT, messages=[{"content": "a b"}]))).body)
    assert chat["choices"][0]["message"]["content"] == "a b"
    text = json.loads((await worker.call(ask(TEXT, prompt="a b c"))).body)
    assert text["choices"][0]["text"] == "a b c"
    assert text["usage"]["total_tokens"] == 6


async def test_a_stream_is_answered(worker: Worker) -> None:
    items = [i async for i in worker.stream(ask(TEXT, prompt="a b", stream=True))]
    assert items[0] == EngineHead(200, "text/event-stream")
    assert items[-1] == b"data: [DONE]\n\n"
    assert len(items) == 5


async def test_a_stream_of_the_requested_length_reports_its_usage() -> None:
    """A hundred of two words' tokens, as vLLM does with `ignore_eos`."""
    worker = Worker(CONFIG, "127.0.0.1")
    await worker.start()
    wanted: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    wanted["stream_options"] = {"include_usage": True}
    items = [i async for i in worker.stream(ask(TEXT, prompt="a b", stream=True, **wanted))]
    events = [json.loads(item[6:]) for item in items[1:-1] if isinstance(item, bytes)]
    assert sum(bool(event["choices"] and event["choices"][0]["text"]) for event in events) == 100
    assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 100, "total_tokens": 102}
    await worker.close()


async def test_at_a_pace_requests_beyond_the_batch_wait_and_steps_are_reported() -> None:
    """A batch of two; six answers of eight tokens: three of them follow each other in a row."""
    worker = Worker(dataclasses.replace(CONFIG, max_num_seqs=2, echo_tpot_s=0.01), "127.0.0.1")
    await worker.start()
    assert worker._engine is not None
    observer, most = worker._engine.observer, []
    observer.changed = lambda: most.append((observer.running, observer.waiting))

    async def one() -> float:
        began_s = time.monotonic()
        items = [i async for i in worker.stream(ask(TEXT, prompt="a b", stream=True, min_tokens=8))]
        assert len(items) == 1 + 8 + 2
        return time.monotonic() - began_s

    took_s = sorted(await asyncio.gather(*(one() for _ in range(6))))
    assert took_s[0] >= 8 * 0.01
    assert took_s[-1] >= 3 * 8 * 0.01
    assert max(running for running, _ in most) == 2
    assert max(waiting for _, waiting in most) == 4
    assert observer.sums.decode_s / observer.sums.steps == pytest.approx(0.01)
    await worker.close()


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": 7}, {"messages": [{}]}])
async def test_an_unreadable_request_is_refused(worker: Worker, body: dict[str, Any]) -> None:
    assert (await worker.call(ask(CHAT, **body))).status == 400


async def test_variants_come_with_requests_or_by_order(worker: Worker) -> None:
    await worker.call(ask(TEXT, V, prompt="x"))
    assert (await worker.report()).variants == ("v",)
    await worker.unload_variant(V)
    assert (await worker.report()).variants == ()
    await worker.load_variant(V)
    assert (await worker.report()).variants == ("v",)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ValueError("too wide"), 422, "adapter_mismatch"),
        (CheckpointError("torn; copy it again"), 400, "source_unreadable"),
        (LoadFailed("out of memory"), 500, "engine_failed"),
    ],
)
async def test_a_variant_that_is_refused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    async def refuse(variant: VariantRef) -> None:
        raise error

    monkeypatch.setattr(worker.engine, "ensure_variant", refuse)
    reply = await worker.call(ask(TEXT, V, prompt="x"))
    assert reply.status == status
    assert json.loads(reply.body) == {"error": {"message": str(error), "code": code}}
    items = [i async for i in worker.stream(ask(TEXT, V, prompt="x"))]
    assert items[0] == EngineHead(status, "application/json")
    assert items[1] == reply.body
    with pytest.raises(type(error), match=str(error)):
        await worker.load_variant(V)


async def failing_app(scope: Message, receive: Any, send: Any) -> None:
    """vLLM's answer for a request that its scheduler gave up."""
    error = {"error": {"message": "Internal server error", "code": 500}}
    if not json.loads((await receive())["body"]).get("stream"):
        await respond(send, 500, [(b"content-type", b"application/json")], json.dumps(error).encode())
        return
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )
    for part in (b'data: {"choices": []}\n\n', b"data: " + json.dumps(error).encode() + b"\n\n"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_that_fails_for_its_variant_names_the_reason(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Whole answers and streams; where the engine does not know, the application's words stay."""
    fault = CheckpointError("layer-00000.safetensors is corrupt; copy it again") if known else None

    async def load_failure(variant: VariantRef) -> Exception | None:
        assert variant == V
        return fault

    monkeypatch.setattr(type(worker.engine), "app", property(lambda engine: failing_app))
    monkeypatch.setattr(worker.engine, "load_failure", load_failure)
    text = str(fault) if fault else "Internal server error"
    reply = await worker.call(ask(TEXT, V, prompt="x"))
    assert (reply.status, json.loads(reply.body)["error"]["message"]) == (400 if known else 500, text)
    head, *parts = [i async for i in worker.stream(ask(TEXT, V, prompt="x", stream=True))]
    assert head == EngineHead(200, "text/event-stream")
    events = b"".join(part for part in parts if isinstance(part, bytes)).split(b"\n\n")
    assert (events[0], events[2:]) == (b'data: {"choices": []}', [b"data: [DONE]", b""])
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"]) == (text, "source_unreadable" if known else 500)
    base = await worker.call(ask(TEXT, prompt="x"))
    assert (base.status, b"Internal server error" in base.body) == (500, True)


async def test_a_worker_reports_itself(worker: Worker) -> None:
    report = await worker.report()
    assert report.engine_version == "echo"
    with urllib.request.urlopen(f"http://{report.metrics_address}/metrics") as page:  # noqa: ASYNC210
        assert b"python_info" in page.read()
    await worker.check_health()


async def test_a_worker_that_was_not_started() -> None:
    with pytest.raises(RuntimeError, match="before its engine"):
        await Worker(CONFIG, "127.0.0.1").call(ask(TEXT, prompt="x"))
