"""Requests from the gateway to the engines, over the HTTP servers of their workers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from controlplane.gateway import warming
from controlplane.gateway.base_workers import BaseWorkers
from controlplane.gateway.engine_limits import EngineLimits
from controlplane.gateway.request_sender import RequestSender
from controlplane.gateway.worker_directory import Alive, Find
from controlplane.state.terms import Priority
from controlplane.traffic.base_router import RoutingRules
from controlplane.traffic.member_set import StepModels
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms
from workers.messages import EngineCall, EngineHead, EngineReply


class WaitingRequests(NamedTuple):
    """The number of requests that wait, and for how long the oldest has waited."""

    requests: int
    longest_s: float


class BaseTraffic(NamedTuple):
    """The metrics of one base: the waiting requests by priority, and the mean relative error of predicted
    times per token (None: unknown)."""

    waiting: dict[Priority, WaitingRequests]
    step_error: float | None


class EngineClient:
    """One per gateway process.

    `find` asks a base's workers for their reports. At most `max_queued` requests wait for a base. Requests in
    groups that are no longer `alive` are cut.
    """

    def __init__(
        self,
        find: Find,
        max_queued: int,
        alive: Alive = lambda group_id: True,
        rules: RoutingRules | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        self._find = find
        self._max_queued = max_queued
        self._alive = alive
        self._rules = rules or RoutingRules()
        self._limits = limits or EngineLimits()
        self._bases: dict[str, BaseWorkers] = {}
        self._models: dict[str, StepModels] = {}

    async def call(self, base: str, call: EngineCall, terms: RequestTerms = NO_TERMS) -> EngineReply:
        """One request, answered as a whole. Raises Overloaded, Late, Cut, EngineFailed or Unavailable."""
        with RequestSender(base, self._workers(base), call, terms, streams=False) as sender:
            answer = await sender.send()
            body = await sender.read()
            return EngineReply(answer.status, answer.content_type, body)

    async def stream(
        self, base: str, call: EngineCall, terms: RequestTerms = NO_TERMS
    ) -> AsyncGenerator[EngineHead | bytes, None]:
        """One request, answered piece by piece: the engine's own pieces, each an event of a stream.

        Closing the generator closes the connection, which cancels the request in the engine.
        """
        with RequestSender(base, self._workers(base), call, terms, streams=True) as sender:
            answer = await sender.send()
            yield EngineHead(answer.status, answer.content_type)
            while (piece := await sender.piece()) is not None:
                yield piece

    def demand(self) -> dict[str, float]:
        """Clients' requests under way by base, waiting ones included: the mean since the last call.

        As it is a mean, requests that came and went between two calls count as well.
        """
        means = {base: workers.demand.average() for base, workers in self._bases.items()}
        return {base: mean for base, mean in means.items() if mean > 0}

    def learn(self, base: str, models: StepModels) -> None:
        """Step times of the base's engines from now on. The same object again changes nothing."""
        self._models[base] = models
        if base in self._bases:
            self._bases[base].learn(models)

    def bases(self) -> list[str]:
        """The bases that received requests."""
        return list(self._bases)

    def views(self) -> dict[str, BaseTraffic]:
        """The views of all bases that received requests. Other threads may call this, too."""
        return {base: _view(workers) for base, workers in list(self._bases.items())}

    def close(self) -> None:
        for workers in self._bases.values():
            workers.close()

    def _workers(self, base: str) -> BaseWorkers:
        known = self._bases.get(base)
        if known is not None:
            return known
        warming.begin()
        made = BaseWorkers(base, self._find, self._max_queued, self._alive, self._rules, self._limits)
        if base in self._models:
            made.learn(self._models[base])
        self._bases[base] = made
        return made


def _view(workers: BaseWorkers) -> BaseTraffic:
    now_s = time.monotonic()
    waiting = {
        priority: WaitingRequests(count, 0.0 if since_s is None else max(0.0, now_s - since_s))
        for priority, (count, since_s) in workers.queue.backlog().items()
    }
    return BaseTraffic(waiting, workers.router.error)
