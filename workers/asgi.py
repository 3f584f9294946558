"""Calls an ASGI application in-process, with cancellation.

For code that runs a worker without a cluster: benchmarks and tests. (In a cluster, requests reach the same
application through the worker's HTTP server.) Also the addition of our own servers to a scope: `DIRECT`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

from workers import request_headers
from workers.messages import EngineCall, EngineHead, EngineReply

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

# The key in a scope with the `DirectRequest` of our own servers.
DIRECT = "ostinato.direct"

_END = object()
_ending: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
# The time for an application to notice that its client left.
GRACE_S = 1.0


class DirectRequest(Protocol):
    """A request inside its server, without the tasks and messages of ASGI.

    It may be used in the server's own loop; `call` and `answer` after the body was read.
    """

    def call(self, on_leaving: Callable[[], None]) -> Callable[[], None]:
        """Call `on_leaving` if the client leaves before the answer is complete; the result cancels this."""
        ...

    def body(self) -> bytes | None:
        """The whole body; None: it must be received by ASGI, because a part of it is missing or was
        received."""
        ...

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole answer, with its length among the headers; False: it must be sent by ASGI."""
        ...


def _scope(request: EngineCall) -> Message:
    named = request_headers.request_headers("", request.variant, request.variant_limit).items()
    headers = [(name.encode(), value.encode()) for name, value in named]
    headers.append((b"content-length", str(len(request.body)).encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }


async def stream(app: AsgiApp, request: EngineCall) -> AsyncGenerator[EngineHead | bytes, None]:
    """POST the request: first the head, then the body's chunks as the application sends them.

    Closing the iterator (or cancelling its consumer) cancels the application's task, which frees the slot of
    a client that has left. An exception of the application is raised here.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
    incoming: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not gone.is_set():
            await queue.put(message)
        else:  # an application that only sends must not block the loop
            await asyncio.sleep(0)

    async def run() -> None:
        try:
            await app(_scope(request), receive, send)
        finally:
            await queue.put(_END)

    task = asyncio.create_task(run())
    try:
        while (message := await queue.get()) is not _END:
            if message["type"] == "http.response.start":
                yield EngineHead(message["status"], _content_type(message))
            elif message.get("body"):
                yield message["body"]
        await task
    finally:
        gone.set()
        if not task.done():
            ending = asyncio.create_task(_end(task, queue))
            _ending.add(ending)
            ending.add_done_callback(_ending.discard)
            await asyncio.shield(ending)  # a consumer may be cancelled again: anyio's scopes do that


async def _end(task: asyncio.Task[None], queue: asyncio.Queue[Any]) -> None:
    """End an application whose client has left.

    It gets a moment to react. vLLM stops generating a whole answer only on the disconnect message; if its
    task were cancelled at once, it would continue generating.
    """
    while not queue.empty():  # no put of the task may block on a full queue
        queue.get_nowait()
    await asyncio.wait({task}, timeout=GRACE_S)
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


def _content_type(message: Message) -> str:
    for name, value in message.get("headers", ()):
        if name.lower() == b"content-type":
            return str(value.decode("latin-1"))
    return "application/json"


async def call(app: AsgiApp, request: EngineCall) -> EngineReply:
    """POST the request and return the whole reply."""
    head = EngineHead(500, "application/json")
    parts: list[bytes] = []
    async with aclosing(stream(app, request)) as items:
        async for item in items:
            if isinstance(item, EngineHead):
                head = item
            else:
                parts.append(item)
    return EngineReply(head.status, head.content_type, b"".join(parts))
