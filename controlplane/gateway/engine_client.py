"""Requests from the gateway to the engines, over the HTTP servers of their workers.

A request is sent again only if no engine has seen it: no connection was made, or the worker's server refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from controlplane import errors
from controlplane.gateway.http1 import BrokenOff, Connection, NotConnected
from controlplane.gateway.worker_pool import RESTART_HINT_S, WAIT_S, Alive, Find, HostWorkers, KnownWorker
from workers import request_headers
from workers.messages import EngineCall, EngineHead, EngineReply

log = logging.getLogger(__name__)

_REFUSED = request_headers.REFUSED.encode()


class EngineClient:
    """One per gateway process.

    `find` asks a host's workers for their reports. Requests in groups that are no longer `alive` are cut.
    """

    def __init__(self, find: Find, max_queued: int, alive: Alive = lambda group_id: True) -> None:
        self._find = find
        self._max_queued = max_queued
        self._alive = alive
        self._hosts: dict[str, HostWorkers] = {}

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
            while (piece := await answer.piece()) is not None:
                yield piece

    def demand(self) -> dict[str, float]:
        """Clients' requests under way by host, waiting ones included: the mean since the last call.

        As it is a mean, requests that came and went between two calls count as well.
        """
        means = {host: workers.demand() for host, workers in self._hosts.items()}
        return {host: mean for host, mean in means.items() if mean > 0}

    def close(self) -> None:
        for workers in self._hosts.values():
            workers.close()

    @asynccontextmanager
    async def _answer(self, host: str, request: EngineCall) -> AsyncIterator[Connection]:
        """The head of the answer; what breaks while its body is read is EngineFailed."""
        workers = self._workers(host)
        deadline_s = asyncio.get_running_loop().time() + WAIT_S
        with workers.admitted(request.counted):
            while True:
                worker = await workers.pick(deadline_s)
                try:
                    async with worker.connection() as connection:
                        if await _taken(worker, connection, request):
                            yield connection
                            return
                except NotConnected as e:
                    log.info("a worker of %s is gone: %s", host, e)
                except BrokenOff as e:
                    log.error("the engine of %s broke off: %s", host, e)
                    raise _died(host) from e
                await workers.drop(worker)

    def _workers(self, host: str) -> HostWorkers:
        if host not in self._hosts:
            self._hosts[host] = HostWorkers(host, self._find, self._max_queued, self._alive)
        return self._hosts[host]


async def _taken(worker: KnownWorker, connection: Connection, request: EngineCall) -> bool:
    """Send the request; False when the worker's server refused it before the engine saw it."""
    named = request_headers.request_headers(worker.secret, request.variant, request.variant_limit)
    headers = {"host": worker.address, **named}
    await connection.ask(request.path, headers, request.body)
    return _REFUSED not in connection.headers


def _content_type(answer: Connection) -> str:
    return answer.headers.get(b"content-type", b"application/json").decode("latin-1")


def _died(host: str) -> errors.EngineFailed:
    return errors.EngineFailed(
        f"the engine of '{host}' died during this request; it is being restarted, try again",
        retry_after_s=RESTART_HINT_S,
    )
