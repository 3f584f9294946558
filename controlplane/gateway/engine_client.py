"""Requests from the gateway to the engines, over the HTTP servers of their workers.

A request is sent again only if no engine has seen it: no connection was made, or the worker's server refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, cast

from controlplane import errors
from controlplane.gateway import warming
from controlplane.gateway.answers import Answer, in_time
from controlplane.gateway.http1 import BrokenOff, Connection, NotConnected
from controlplane.gateway.worker_pool import RESTART_HINT_S, Alive, Find, HostWorkers, KnownWorker
from controlplane.state.terms import Priority
from controlplane.traffic.host_router import Asked, RoutingRules, StepModels
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms
from workers import request_headers
from workers.messages import EngineCall, EngineHead, EngineReply

log = logging.getLogger(__name__)

_REFUSED = request_headers.REFUSED.encode()


class HostView(NamedTuple):
    """Of one host, for metrics: requests in the line and for how long the oldest waits, by priority; the mean
    relative error of predicted times per token (None: none was seen)."""

    waiting: dict[Priority, tuple[int, float]]
    step_error: float | None


class EngineClient:
    """One per gateway process.

    `find` asks a host's workers for their reports. At most `max_queued` requests wait for a host. Requests in
    groups that are no longer `alive` are cut.
    """

    def __init__(
        self,
        find: Find,
        max_queued: int,
        alive: Alive = lambda group_id: True,
        rules: RoutingRules | None = None,
    ) -> None:
        self._find = find
        self._max_queued = max_queued
        self._alive = alive
        self._rules = rules or RoutingRules()
        self._hosts: dict[str, HostWorkers] = {}
        self._models: dict[str, StepModels] = {}

    async def call(self, host: str, request: EngineCall, terms: RequestTerms = NO_TERMS) -> EngineReply:
        """One request, answered as a whole. Raises Overloaded, Late, EngineFailed or Unavailable."""
        async with self._answer(host, request, terms, streams=False) as answer:
            return EngineReply(answer.status, answer.content_type, await answer.read())

    async def stream(
        self, host: str, request: EngineCall, terms: RequestTerms = NO_TERMS
    ) -> AsyncGenerator[EngineHead | bytes, None]:
        """One request, answered piece by piece: the engine's own pieces, each an event of a stream.

        Closing the generator closes the connection, which cancels the request in the engine.
        """
        async with self._answer(host, request, terms, streams=True) as answer:
            yield EngineHead(answer.status, answer.content_type)
            while (piece := await answer.piece()) is not None:
                yield piece

    def demand(self) -> dict[str, float]:
        """Clients' requests under way by host, waiting ones included: the mean since the last call.

        As it is a mean, requests that came and went between two calls count as well.
        """
        means = {host: workers.demand() for host, workers in self._hosts.items()}
        return {host: mean for host, mean in means.items() if mean > 0}

    def learn(self, host: str, models: StepModels) -> None:
        """What steps of the host's engines take, from now on. The same object again changes nothing."""
        self._models[host] = models
        if host in self._hosts:
            self._hosts[host].learn(models)

    def hosts(self) -> list[str]:
        """That were asked."""
        return list(self._hosts)

    def views(self) -> dict[str, HostView]:
        """Of all hosts that were asked. For another thread, too."""
        return {host: _view(workers) for host, workers in list(self._hosts.items())}

    def close(self) -> None:
        for workers in self._hosts.values():
            workers.close()

    @asynccontextmanager
    async def _answer(
        self, host: str, request: EngineCall, terms: RequestTerms, streams: bool
    ) -> AsyncIterator[Answer]:
        """The head of the answer; what breaks while its body is read is EngineFailed."""
        workers = self._workers(host)
        uid = request.variant.uid if request.variant is not None else 0
        asked = Asked(terms, uid, time.monotonic(), streams, request.counted)
        went = False
        with workers.under_way(asked):
            while True:
                flight = await in_time(host, asked, asked.first_by_s, workers.enter(asked, went))
                worker, answer = cast(KnownWorker, flight.member), None
                limit_s = asked.first_by_s if streams else asked.whole_by_s
                try:
                    async with worker.connection() as connection:
                        if await in_time(host, asked, limit_s, _taken(worker, connection, request)):
                            workers.taken()
                            on_first = partial(workers.turnstile.filled, flight)
                            answer = Answer(host, asked, connection, on_first)
                            yield answer
                            return
                        workers.drop(worker)
                except NotConnected as e:
                    log.info("a worker of %s is gone: %s", host, e)
                    workers.drop(worker)
                except BrokenOff as e:
                    log.error("the engine of %s broke off: %s", host, e)
                    raise _died(host) from e
                finally:
                    workers.ended(flight, None if answer is None else answer.tokens)
                went = True

    def _workers(self, host: str) -> HostWorkers:
        if host not in self._hosts:
            warming.begin()
            made = HostWorkers(host, self._find, self._max_queued, self._alive, self._rules)
            if host in self._models:
                made.learn(self._models[host])
            self._hosts[host] = made
        return self._hosts[host]


async def _taken(worker: KnownWorker, connection: Connection, request: EngineCall) -> bool:
    """Send the request; False when the worker's server refused it before the engine saw it."""
    named = request_headers.request_headers(worker.secret, request.variant, request.variant_limit)
    headers = {"host": worker.address, **named}
    await connection.ask(request.path, headers, request.body)
    return _REFUSED not in connection.headers


def _view(workers: HostWorkers) -> HostView:
    now_s = time.monotonic()
    waiting = {
        priority: (count, 0.0 if since_s is None else max(0.0, now_s - since_s))
        for priority, (count, since_s) in workers.turnstile.standing().items()
    }
    return HostView(waiting, workers.router.error)


def _died(host: str) -> errors.EngineFailed:
    return errors.EngineFailed(
        f"the engine of '{host}' died during this request; it is being restarted, try again",
        retry_after_s=RESTART_HINT_S,
    )
