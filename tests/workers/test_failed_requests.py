"""A worker's answer when its application breaks at a request, or reports a failure."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from profiler.errors import CheckpointError
from workers import asgi, request_headers
from workers.asgi import AsgiApp
from workers.bus.faults import LoadFailed
from workers.messages import ERROR_EVENT, EngineCall, EngineReply
from workers.server.failed_requests import answered, nothing_known

ERROR_OF_A_STREAM = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


class GenerationError(Exception):
    """As vLLM names the end of a request that it gave up."""


class VLLMClientError(Exception):
    """As vLLM names the errors about a request."""


class VLLMValidationError(VLLMClientError):
    parameter: str


def application() -> FastAPI:
    """Like vLLM's: a handler for whatever it does not expect, which Starlette calls before it raises on."""
    app = FastAPI()

    @app.exception_handler(Exception)
    async def unexpected(request: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": "unexpected", "code": 500}}, 500)

    @app.post("/breaks")
    async def breaks() -> None:
        raise ZeroDivisionError("float division by zero")

    @app.post("/dies")
    async def dies() -> None:
        raise RuntimeError("a queue is closed")

    @app.post("/fails")
    async def fails() -> JSONResponse:
        return JSONResponse({"error": {"message": "Internal server error", "code": 500}}, 500)

    @app.post("/answers")
    async def answers() -> dict[str, str]:
        return {"text": "x"}

    async def pieces(*, breaks: Exception | None = None) -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        if breaks:
            raise breaks
        yield ERROR_OF_A_STREAM

    @app.post("/streams")
    async def streams() -> StreamingResponse:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    @app.post("/breaks-late")
    async def breaks_late() -> StreamingResponse:
        return StreamingResponse(pieces(breaks=ZeroDivisionError("late")), media_type="text/event-stream")

    @app.post("/refuses")
    async def refuses() -> StreamingResponse:
        error = VLLMValidationError("no such rule")
        error.parameter = "structured_outputs"
        return StreamingResponse(pieces(breaks=error), media_type="text/event-stream")

    @app.post("/gives-up")
    async def gives_up() -> StreamingResponse:
        error = ValueError("no valid event")
        error.__context__ = GenerationError("Internal server error")
        return StreamingResponse(pieces(breaks=error), media_type="text/event-stream")

    return app


def served(why: Any = nothing_known, *, lives: bool = True) -> AsgiApp:
    app = application()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await answered(lambda send: app(scope, receive, send), send, why, lambda: lives)

    return answer


async def asked(path: str, why: Any = nothing_known, *, lives: bool = True) -> EngineReply:
    return await asgi.call(served(why, lives=lives), EngineCall(path, b"{}"))


def error_of(reply: EngineReply) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(reply.body)["error"]
    return error


async def unreadable() -> Exception:
    return CheckpointError("a.safetensors is torn")


async def test_a_request_that_breaks_the_application_is_refused_while_the_engine_runs() -> None:
    reply = await asked("/breaks")
    assert reply.status == 400
    error = error_of(reply)
    assert error["code"] == 400
    assert "ZeroDivisionError: float division by zero" in error["message"]
    assert "a wrong type" in error["message"]


async def test_a_failure_that_may_be_the_engine_s_is_not_refused() -> None:
    reply = await asked("/dies")
    assert (reply.status, error_of(reply)["message"]) == (500, "unexpected")


async def test_a_failure_of_a_dead_engine_is_no_refusal() -> None:
    reply = await asked("/breaks", lives=False)
    assert (reply.status, error_of(reply)["message"]) == (500, "unexpected")


async def test_a_bare_application_answers_as_well() -> None:
    async def breaks(send: Any) -> None:
        raise ZeroDivisionError("bare")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answered(breaks, send, nothing_known, lambda: False)

    reply = await asgi.call(app, EngineCall("/x", b""))
    assert reply.status == 500
    assert "bare" in error_of(reply)["message"]


async def test_the_application_s_own_answers_stay() -> None:
    reply = await asked("/fails")
    assert (reply.status, error_of(reply)["message"]) == (500, "Internal server error")
    assert (await asked("/answers")).body == b'{"text":"x"}'


@pytest.mark.parametrize("path", ["/fails", "/breaks"])
@pytest.mark.parametrize("lives", [True, False])
async def test_a_variant_that_could_not_be_loaded_is_the_reason(path: str, lives: bool) -> None:
    reply = await asked(path, unreadable, lives=lives)
    assert reply.status == 400
    assert error_of(reply) == {"message": "a.safetensors is torn", "code": "source_unreadable"}


async def test_a_failure_in_a_stream_is_explained_too() -> None:
    pieces = [item async for item in asgi.stream(served(unreadable), EngineCall("/streams", b"{}"))]
    assert pieces[1] == b"data: one\n\n"
    assert isinstance(pieces[2], bytes)
    assert json.loads(pieces[2].removeprefix(b"data: "))["error"]["code"] == "source_unreadable"


async def test_a_stream_that_breaks_ends_with_an_error_event_while_the_engine_runs() -> None:
    """vLLM's Responses raise; its chats send this event themselves."""
    for path, message in (("/breaks-late", "ZeroDivisionError"), ("/gives-up", "Internal server error")):
        pieces = [item async for item in asgi.stream(served(), EngineCall(path, b"{}"))]
        assert pieces[1] == b"data: one\n\n"
        assert isinstance(pieces[2], bytes)
        assert pieces[2].startswith(ERROR_EVENT)
        error = json.loads(pieces[2].removeprefix(b"data: "))["error"]
        assert (error["code"], message in error["message"]) == (500, True)
        assert len(pieces) == 3


async def test_a_value_that_the_engine_refuses_in_a_stream_is_the_request_s_mistake() -> None:
    """vLLM's Responses begin before the engine has seen the grammar."""
    items = [item async for item in asgi.stream(served(), EngineCall("/refuses", b"{}"))]
    assert isinstance(items[2], bytes)
    error = json.loads(items[2].removeprefix(b"data: "))["error"]
    assert error == {"message": "no such rule", "code": 400, "param": "structured_outputs"}


async def test_a_stream_of_a_dead_engine_breaks_off() -> None:
    items = asgi.stream(served(lives=False), EngineCall("/breaks-late", b"{}"))
    assert [await anext(items), await anext(items)][1] == b"data: one\n\n"
    with pytest.raises(ZeroDivisionError):
        await anext(items)


async def out_of_memory() -> Exception:
    return LoadFailed("no room in host memory")


@pytest.mark.parametrize(
    ("path", "why", "fault"),
    [
        ("/breaks", nothing_known, request_headers.OF_UNDERSTANDING),
        ("/fails", out_of_memory, request_headers.OF_LOADING),
        ("/breaks", out_of_memory, request_headers.OF_LOADING),
        ("/fails", unreadable, None),
        ("/fails", nothing_known, None),
        ("/answers", nothing_known, None),
    ],
)
async def test_a_header_gives_the_gateway_the_kind_of_failure(
    path: str, why: Any, fault: bytes | None
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await served(why)(scope, receive, send)
    assert dict(sent[0]["headers"]).get(request_headers.FAULT.encode()) == fault
