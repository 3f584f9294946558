"""One request's way to a worker, and back.

It is sent again if no engine has seen it: no connection was made, the worker's server refused, or a stranger
answered, who has the worker's port by now. And once, if its worker fell silent before anything of an answer
came: then nobody has seen what the engine made of it.

A class, and not a context manager made of a generator: that costs several times as much, for each request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from types import TracebackType
from typing import TypeVar

from controlplane import errors
from controlplane.gateway.answers import Answer, in_time
from controlplane.gateway.engine_errors import from_engine
from controlplane.gateway.engine_limits import no_byte
from controlplane.gateway.http1 import BrokenOff, Connection, Moved, NotConnected, head_of
from controlplane.gateway.worker_pool import RESTART_HINT_S, HostWorkers, KnownWorker
from controlplane.traffic.host_router import Asked, Flight
from controlplane.traffic.request_terms import RequestTerms
from workers import request_headers
from workers.messages import EngineCall, VariantRef

log = logging.getLogger(__name__)

_REFUSED = request_headers.REFUSED.encode()
_HEADS = 4096

T = TypeVar("T")


class Exchange:
    """A context, in which the answer is read. It counts the request, holds its place at a worker and the
    connection to it, and gives them back. A connection that breaks off within it is EngineFailed."""

    def __init__(
        self, host: str, workers: HostWorkers, request: EngineCall, terms: RequestTerms, streams: bool
    ) -> None:
        self._host = host
        self._workers = workers
        self._request = request
        uid = request.variant.uid if request.variant is not None else 0
        self._asked = Asked(terms, uid, time.monotonic(), streams, request.counted)
        self._flight: Flight | None = None
        self._connection: Connection | None = None
        self._answer: Answer | None = None
        self._was_moved = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Exchange:
        self._workers.begin(self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenOff | errors.Cut) and self._flight is not None:
            self._workers.failed(self._worker)
        try:
            self._leave()
        finally:
            self._workers.end(self._asked, isinstance(error, errors.Overloaded | errors.Late))
        if isinstance(error, BrokenOff):
            log.error("the engine of %s broke off: %s", self._host, error)
            raise _died(self._host) from error

    async def answer(self) -> Answer:
        """The head of the answer. Raises Overloaded, Late, Unavailable, Cut or BrokenOff."""
        return await self._sent(went=False)

    async def read(self) -> bytes:
        """All of the answer. Raises BrokenOff, Late, Cut."""
        return await self._whatever_moves(lambda answer: answer.read())

    async def piece(self) -> bytes | None:
        """The next piece of a stream. Raises BrokenOff, Late, Cut."""
        return await self._whatever_moves(lambda answer: answer.piece())

    async def _whatever_moves(self, take: Callable[[Answer], Awaitable[T]]) -> T:
        assert self._answer is not None
        try:
            return await take(self._answer)
        except Moved:
            status = self._answer.status
            answer = await self._moved()
        if answer.status != status:  # its head may have been sent on
            raise from_engine(answer.status, await answer.read(), self._request.grammar)
        return await take(answer)

    async def _moved(self) -> Answer:
        log.warning("a request to %s goes to another worker, for %s is silent", self._host, self._worker.name)
        self._was_moved = True
        self._leave()
        return await self._sent(went=True)

    async def _sent(self, went: bool) -> Answer:
        workers, asked = self._workers, self._asked
        while True:
            flight = workers.at_once(asked, went)
            if flight is None:
                flight = await in_time(
                    self._host, asked, asked.first_by_s, workers.enter(asked, went, self._request.variant)
                )
            worker: KnownWorker = flight.member  # type: ignore[assignment]  # members here are such
            self._flight, self._worker = flight, worker
            try:
                taken = await self._taken(worker)
            except NotConnected as e:
                log.info("a worker of %s is gone: %s", self._host, e)
                taken = None
            except Moved:
                return await self._moved()
            if taken is not None:
                workers.taken()
                self._answer = Answer(self._host, asked, taken, self._began)
                return self._answer
            workers.drop(worker)
            self._leave()
            went = True

    async def _taken(self, worker: KnownWorker) -> Connection | None:
        """The connection on which a worker answers. None: its server refused before the engine saw it, or it
        was a stranger."""
        request, asked = self._request, self._asked
        self._connection = connection = await worker.take()
        connection.may_move = not self._was_moved
        if asked.streams:
            limits = self._workers.limits
            self._look_later(min(limits.first_byte_s, limits.next_byte_s))
        head = _head(worker.address, worker.secret, request.path, request.variant, request.variant_limit)
        limit_s = asked.first_by_s if asked.streams else asked.whole_by_s
        asking = connection.ask_with(head, request.body)
        await (asking if limit_s is None else in_time(self._host, asked, limit_s, asking))
        if not request_headers.proves(connection.headers, worker.proof):
            log.warning("not a worker of %s, but a stranger answers at %s", self._host, worker.address)
            return None
        return None if _REFUSED in connection.headers else connection

    def _began(self) -> None:
        """The first piece of a stream came, or a whole answer."""
        if self._flight is not None and self._asked.streams:
            self._workers.turnstile.filled(self._flight)
        if self._answer is not None:
            answer = self._answer
            self._workers.answered(self._worker, answer.status, answer.fault, self._asked.variant)

    def _look_later(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        """Whether the engine has said nothing for too long, while somebody waited for it."""
        connection, limits = self._connection, self._workers.limits
        if connection is None:
            return
        is_first = not connection.has_begun
        limit_s = limits.first_byte_s if is_first else limits.next_byte_s
        now_s = asyncio.get_running_loop().time()
        left_s = connection.waits_since_s(now_s) + limit_s - now_s
        if left_s > 0:  # a first byte may come, and then the other limit holds
            self._look_later(min(left_s, limits.next_byte_s))
        else:
            self._timer = None
            connection.end(no_byte(self._host, is_first, limit_s))

    def _leave(self) -> None:
        """Whatever became of it, it is this worker's no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        flight, self._flight = self._flight, None
        if flight is None:
            return
        connection, self._connection = self._connection, None
        answer, self._answer = self._answer, None  # which knows this, and would keep it
        try:
            if connection is not None:
                self._worker.give_back(connection)
        finally:
            self._workers.ended(flight, None if answer is None else answer.tokens)


@lru_cache(_HEADS)
def _head(address: str, secret: str, path: str, variant: VariantRef | None, limit: int | None) -> bytes:
    """How requests begin that differ in their body alone."""
    return head_of("POST", path, {"host": address, **request_headers.request_headers(secret, variant, limit)})


def _died(host: str) -> errors.EngineFailed:
    return errors.EngineFailed(
        f"the engine of '{host}' died during this request; it is being restarted, try again",
        retry_after_s=RESTART_HINT_S,
    )
