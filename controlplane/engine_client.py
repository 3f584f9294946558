"""Requests from the gateway to the engines: HTTP/1.1 to the workers' doors. The one module with that client.

A request is sent again only if no worker has seen it: no connection was made, or a door refused it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from controlplane import errors
from controlplane.host_workers import RESTART_HINT_S, WAIT_S, Find, HostWorkers, KnownWorker
from workers import wire
from workers.messages import EngineCall, EngineHead, EngineReply

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
# Below the workers' own limit, so that an idle connection always ends on this side.
IDLE_CONNECTION_S = 300.0


class EngineClient:
    """One per gateway process. `find` asks a host's workers for their reports."""

    def __init__(self, find: Find, max_queued: int) -> None:
        self._find = find
        self._max_queued = max_queued
        self._hosts: dict[str, HostWorkers] = {}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, host: str, request: EngineCall) -> EngineReply:
        """One request, answered as a whole. Raises Overloaded, EngineFailed or Unavailable."""
        async with self._answer(host, request) as answer:
            return EngineReply(answer.status, _content_type(answer), await answer.read())

    async def stream(self, host: str, request: EngineCall) -> AsyncGenerator[EngineHead | bytes, None]:
        """One request, answered piece by piece: the engine's own pieces, each an event of a stream.

        Closing the generator closes the connection, which cancels the request in the engine.
        """
        async with self._answer(host, request) as answer:
            yield EngineHead(answer.status, _content_type(answer))
            async for piece in _pieces(answer):
                yield piece

    async def close(self) -> None:
        for workers in self._hosts.values():
            await workers.close()
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _answer(self, host: str, request: EngineCall) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of the answer; what breaks while its body is read is EngineFailed."""
        workers = self._workers(host)
        deadline_s = asyncio.get_running_loop().time() + WAIT_S
        with workers.admitted():
            while True:
                worker = await workers.pick(deadline_s)
                with worker.asked():
                    try:
                        if (answer := await self._post(worker, request)) is not None:
                            try:
                                yield answer
                            finally:
                                answer.close()  # one read to its end gave its connection back before
                            return
                    except aiohttp.ClientError as e:
                        log.error("the engine of %s broke off: %r", host, e)
                        raise _broke_off(host) from e
                workers.drop(worker)

    async def _post(self, worker: KnownWorker, request: EngineCall) -> aiohttp.ClientResponse | None:
        """None when the worker never saw the request: not there, or its door refused it."""
        if self._session is None:
            self._session = _new_session()
        headers = wire.request_headers(worker.secret, request.variant)
        try:
            answer = await self._session.post(
                f"http://{worker.address}{request.path}", data=request.body, headers=headers
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return None
        if wire.REFUSED in answer.headers:
            answer.close()
            return None
        return answer

    def _workers(self, host: str) -> HostWorkers:
        if host not in self._hosts:
            self._hosts[host] = HostWorkers(host, self._find, self._max_queued)
        return self._hosts[host]


def _new_session() -> aiohttp.ClientSession:
    """As many connections as requests run at once, kept for the next ones; nothing is added to requests."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        auto_decompress=False,
        trust_env=False,
    )


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as the engine sent it: one HTTP chunk is one event of a stream."""
    parts: list[bytes] = []
    async for data, ends_chunk in answer.content.iter_chunks():
        parts.append(data)
        if ends_chunk:
            yield b"".join(parts)
            parts.clear()
    if parts:
        yield b"".join(parts)


def _content_type(answer: aiohttp.ClientResponse) -> str:
    return answer.headers.get("Content-Type", "application/json")


def _broke_off(host: str) -> errors.EngineFailed:
    return errors.EngineFailed(
        f"the engine of '{host}' died during this request; it is being restarted, try again",
        retry_after_s=RESTART_HINT_S,
    )
