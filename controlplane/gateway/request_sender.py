"""Sends one request to a worker, and reads the answer.

The request is sent again if no engine has seen it: no connection was made, the worker's server refused, or
another process answered, which now has the worker's port. It is sent again once if its worker became silent
before any part of an answer came: the client has then seen nothing of it.

`RequestSender` is a class: a context manager that is made of a generator costs several times as much per
request.
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
from controlplane.gateway.base_workers import RESTART_HINT_S, BaseWorkers
from controlplane.gateway.engine_answer import EngineAnswer, in_time
from controlplane.gateway.engine_errors import from_engine
from controlplane.gateway.engine_limits import no_byte
from controlplane.gateway.known_worker import KnownWorker
from controlplane.traffic.member import RoutedRequest
from controlplane.traffic.request import InferenceRequest
from controlplane.traffic.request_terms import RequestTerms
from workers import request_headers
from workers.http1.client import BrokenOff, Connection, Moved, NotConnected, head_of
from workers.messages import EngineCall, VariantRef

log = logging.getLogger(__name__)

_REFUSED = request_headers.REFUSED.encode()
_HEADS = 4096

T = TypeVar("T")


class RequestSender:
    """A context that admits, routes and sends one request, and in which its answer is read.

    It counts the request, holds its place at a worker and its connection, and releases both. A connection
    that breaks off within the context raises EngineFailed.
    """

    def __init__(
        self, base: str, workers: BaseWorkers, call: EngineCall, terms: RequestTerms, streams: bool
    ) -> None:
        self._base = base
        self._workers = workers
        self._call = call
        uid = call.variant.uid if call.variant is not None else 0
        self._request = InferenceRequest(terms, uid, time.monotonic(), streams, call.counted)
        self._routed: RoutedRequest | None = None
        self._connection: Connection | None = None
        self._answer: EngineAnswer | None = None
        self._was_moved = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> RequestSender:
        self._workers.begin(self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenOff | errors.Cut) and self._routed is not None:
            self._workers.health.failed(self._worker)
        try:
            self._release_worker()
        finally:
            self._workers.demand.end(self._request, isinstance(error, errors.Overloaded | errors.Late))
        if isinstance(error, BrokenOff):
            log.error("the engine of %s broke off its answer: %s", self._base, error)
            raise _died(self._base) from error

    async def send(self) -> EngineAnswer:
        """Send the request; the answer, whose head has come. Raises Overloaded, Late, Unavailable, Cut or
        BrokenOff."""
        return await self._send(resent=False)

    async def read(self) -> bytes:
        """The whole answer. Raises BrokenOff, Late, Cut."""
        return await self._read(EngineAnswer.read)

    async def piece(self) -> bytes | None:
        """The next piece of a stream. Raises BrokenOff, Late, Cut."""
        return await self._read(EngineAnswer.piece)

    async def _read(self, read: Callable[[EngineAnswer], Awaitable[T]]) -> T:
        """Read from the answer; if the request moves to another worker, read from that worker's answer."""
        assert self._answer is not None
        try:
            return await read(self._answer)
        except Moved:
            status = self._answer.status
            answer = await self._send_elsewhere()
        if answer.status != status:  # the first head may have been sent to the client
            raise from_engine(answer.status, await answer.read(), self._call.grammar)
        return await read(answer)

    async def _send_elsewhere(self) -> EngineAnswer:
        log.warning("a request to %s goes to another worker: %s is silent", self._base, self._worker.name)
        self._was_moved = True
        self._release_worker()
        return await self._send(resent=True)

    async def _send(self, resent: bool) -> EngineAnswer:
        while True:
            worker = await self._admit(resent)
            try:
                connection = await self._ask(worker)
            except NotConnected as e:
                log.info("a worker of %s is gone: %s", self._base, e)
                connection = None
            except Moved:
                return await self._send_elsewhere()
            if connection is not None:
                self._workers.taken()
                self._answer = EngineAnswer(self._base, self._request, connection, self._began)
                return self._answer
            self._workers.directory.drop(worker)
            self._release_worker()
            resent = True

    async def _admit(self, resent: bool) -> KnownWorker:
        """The worker that the request is routed to, perhaps after a wait in the queue."""
        workers, request = self._workers, self._request
        routed = workers.queue.at_once(request, resent)
        if routed is None:
            entering = workers.enter(request, resent, self._call.variant)
            limit_s = request.first_by_s
            routed = await (entering if limit_s is None else in_time(self._base, request, limit_s, entering))
        worker: KnownWorker = routed.member  # type: ignore[assignment]  # all members are
        self._routed, self._worker = routed, worker
        return worker

    async def _ask(self, worker: KnownWorker) -> Connection | None:
        """The connection on which the worker answers. None: its server refused the request before the engine
        saw it, or another process answered."""
        call, request = self._call, self._request
        self._connection = connection = await worker.take()
        connection.may_move = not self._was_moved
        if request.streams:
            limits = self._workers.limits
            self._check_silence_in(min(limits.first_byte_s, limits.next_byte_s))
        head = _head(worker.address, worker.secret, call.path, call.variant, call.variant_limit)
        limit_s = request.first_by_s if request.streams else request.whole_by_s
        asking = connection.ask_with(head, call.body)
        await (asking if limit_s is None else in_time(self._base, request, limit_s, asking))
        if not request_headers.proves(connection.headers, worker.proof):
            log.warning("another process than a worker of %s answers at %s", self._base, worker.address)
            return None
        return None if _REFUSED in connection.headers else connection

    def _began(self) -> None:
        """The first piece of a stream came, or the whole answer."""
        if self._routed is not None and self._request.streams:
            self._workers.queue.filled(self._routed)
        if self._answer is not None:
            answer = self._answer
            self._workers.health.answered(self._worker, answer.status, answer.fault, self._request.variant)

    def _check_silence_in(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._check_silence)

    def _check_silence(self) -> None:
        """End the request if the engine sent nothing for too long while the client waited."""
        connection, limits = self._connection, self._workers.limits
        if connection is None:
            return
        is_first = not connection.has_begun
        limit_s = limits.first_byte_s if is_first else limits.next_byte_s
        now_s = asyncio.get_running_loop().time()
        left_s = connection.waits_since_s(now_s) + limit_s - now_s
        if left_s > 0:  # after the first byte, the other limit applies
            self._check_silence_in(min(left_s, limits.next_byte_s))
        else:
            self._timer = None
            connection.end(no_byte(self._base, is_first, limit_s))

    def _release_worker(self) -> None:
        """Give the connection and the request's place at the worker back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        routed, self._routed = self._routed, None
        if routed is None:
            return
        connection, self._connection = self._connection, None
        answer, self._answer = self._answer, None  # breaks the reference cycle with this object
        try:
            if connection is not None:
                self._worker.give_back(connection)
        finally:
            self._workers.released(routed, None if answer is None else answer.tokens)


@lru_cache(_HEADS)
def _head(address: str, secret: str, path: str, variant: VariantRef | None, limit: int | None) -> bytes:
    """The head of requests that differ only in their body."""
    return head_of("POST", path, {"host": address, **request_headers.request_headers(secret, variant, limit)})


def _died(base: str) -> errors.EngineFailed:
    return errors.EngineFailed(
        f"the engine of '{base}' died during this request; it is being restarted, try again",
        retry_after_s=RESTART_HINT_S,
    )
