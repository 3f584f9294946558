"""Streamed answers: the engine's events, passed on to the client as they come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from controlplane import errors
from controlplane.api.departure import unless_client_leaves
from controlplane.api.error_formats import error_event
from controlplane.api.inference.request_record import CLIENT_GONE, RequestRecord
from controlplane.api.request_limits import WRITE_TIMEOUT_S
from controlplane.api.time_limit import TimeLimit, WriteLimit, timed_out
from controlplane.gateway.engine_errors import from_engine, from_engine_event
from controlplane.gateway.stream_events import has_token
from controlplane.traffic.endpoints import format_of
from workers.asgi import DIRECT
from workers.messages import ERROR_EVENT, EngineCall, EngineHead

log = logging.getLogger(__name__)

CUT = "cut"  # the client read nothing of its answer for too long
Items = AsyncGenerator[EngineHead | bytes, None]


async def streamed(items: Items, call: EngineCall, record: RequestRecord) -> Response:
    """The response that streams `items`, the engine's head and events. `call`: the request, for errors.

    The head has come when this returns, so an engine's refusal keeps its status. If the request may be
    dropped for being late, its first event has come, too.

    Errors: TimedOut, EngineFailed, those of the engine's status.
    """
    grammar = call.grammar
    limit_s = record.services.settings.request_timeout_s
    write_s = record.services.limits.stream_write_s
    first: bytes | None = None
    try:
        async with asyncio.timeout(limit_s):
            head = await _head(items, grammar)
            if record.terms.dropped_after_s is not None:
                first = await _first(items, grammar, record)
    except BaseException as e:
        await items.aclose()
        if isinstance(e, TimeoutError):
            raise timed_out(limit_s) from e
        raise

    async def close() -> None:
        await items.aclose()
        record.end(CLIENT_GONE)

    def cut() -> None:
        log.info(
            "a client of '%s' read nothing of its answer for %g s; the gateway closed the connection",
            record.model,
            write_s,
        )
        record.end(CUT, by_client=True)

    chunks = _chunks(items, first, record, limit_s, call)
    return ClosingStream(chunks, close, head.content_type, cut, write_s)


async def _head(items: Items, grammar: str) -> EngineHead:
    head = await anext(items, None)
    if not isinstance(head, EngineHead):
        raise errors.EngineFailed("the engine's answer did not start with its headers")
    if head.status >= 300:
        rest = [part async for part in items if isinstance(part, bytes)]
        raise from_engine(head.status, b"".join(rest), grammar)
    return head


async def _first(items: Items, grammar: str, record: RequestRecord) -> bytes | None:
    """The events up to the first that comes from a token; None if the stream has no event."""
    seen = b""
    async for item in items:
        record.chunk(item)
        piece = _checked(item, grammar)
        seen += piece
        if has_token(piece):
            break
    return seen or None


async def _chunks(
    items: Items, first: bytes | None, record: RequestRecord, limit_s: float, call: EngineCall
) -> AsyncGenerator[bytes, None]:
    """The events for the client. The engine's `first` event may have come already. An error on the way is
    the last event."""
    code, of = CLIENT_GONE, format_of(call.path)
    try:
        with TimeLimit(limit_s) as limit:
            async with contextlib.aclosing(items):
                if first is not None and (shown := record.shown(first)):
                    limit.pause()
                    yield shown
                    limit.go_on()
                async for item in items:
                    record.chunk(item)
                    if not (piece := record.shown(_checked(item, call.grammar))):
                        continue
                    limit.pause()  # the response limits the time that the client takes
                    yield piece
                    limit.go_on()
        code = "ok"
    except TimeoutError:
        code = errors.TimedOut.code
        yield error_event(timed_out(limit_s), of)
    except errors.OstinatoError as e:
        code = e.code
        record.fail(e)
        yield error_event(record.services.hide(e), of)
    except Exception:
        log.exception("a stream of '%s' broke", record.model)
        code = errors.OstinatoError.code
        error = errors.OstinatoError("an unexpected error in the gateway; the gateway's log has its details")
        yield error_event(error, of)
    finally:
        record.end(code)


def _checked(item: EngineHead | bytes, grammar: str) -> bytes:
    """The event. Errors: the meaning of an error event of the engine."""
    if not isinstance(item, bytes):
        raise errors.EngineFailed("the engine's answer has its headers twice")
    if item.startswith(ERROR_EVENT):
        raise from_engine_event(item, grammar)
    return item


class ClosingStream(StreamingResponse):
    """Closes its generator however the response ends, so that a lost client frees its engine slot.

    `close` does what the generator's own `finally` would do: a client that is lost before the first chunk
    leaves a generator that never ran. `cut` is called when a chunk could not be sent for `write_s`; the
    server around us then resets the connection.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        media_type: str,
        cut: Callable[[], None] = lambda: None,
        write_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        super().__init__(content, media_type=media_type)
        self._content = content
        self._close = close
        self._cut = cut
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = WriteLimit(self._write_s, send)
        try:
            with limit:
                # This costs less than Starlette's task group.
                await unless_client_leaves(receive, self.stream_response(limit.send), scope.get(DIRECT))
        except TimeoutError:
            self._cut()
        finally:
            await self._content.aclose()
            await self._close()
