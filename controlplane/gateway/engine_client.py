"""Requests from the gateway to the engines, over the HTTP servers of their workers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import NamedTuple

from controlplane.gateway import warming
from controlplane.gateway.engine_limits import EngineLimits
from controlplane.gateway.host_workers import HostWorkers
from controlplane.gateway.request_sender import RequestSender
from controlplane.gateway.worker_directory import Alive, Find
from controlplane.state.terms import Priority
from controlplane.traffic.host_router import RoutingRules
from controlplane.traffic.member_set import StepModels
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms
from workers.messages import EngineCall, EngineHead, EngineReply


class WaitingRequests(NamedTuple):
    """The number of requests that wait, and for how long the oldest has waited."""

    requests: int
    longest_s: float


class HostView(NamedTuple):
    """The metrics of one host: the waiting requests by priority, and the mean relative error of predicted
    times per token (None: unknown)."""

    waiting: dict[Priority, WaitingRequests]
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
        limits: EngineLimits | None = None,
    ) -> None:
        self._find = find
        self._max_queued = max_queued
        self._alive = alive
        self._rules = rules or RoutingRules()
        self._limits = limits or EngineLimits()
        self._hosts: dict[str, HostWorkers] = {}
        self._models: dict[str, StepModels] = {}

    async def call(self, host: str, call: EngineCall, terms: RequestTerms = NO_TERMS) -> EngineReply:
        """One request, answered as a whole. Raises Overloaded, Late, Cut, EngineFailed or Unavailable."""
        with RequestSender(host, self._workers(host), call, terms, streams=False) as sender:
            answer = await sender.send()
            body = await sender.read()
            return EngineReply(answer.status, answer.content_type, body)

    async def stream(
        self, host: str, call: EngineCall, terms: RequestTerms = NO_TERMS
    ) -> AsyncGenerator[EngineHead | bytes, None]:
        """One request, answered piece by piece: the engine's own pieces, each an event of a stream.

        Closing the generator closes the connection, which cancels the request in the engine.
        """
        with RequestSender(host, self._workers(host), call, terms, streams=True) as sender:
            answer = await sender.send()
            yield EngineHead(answer.status, answer.content_type)
            while (piece := await sender.piece()) is not None:
                yield piece

    def demand(self) -> dict[str, float]:
        """Clients' requests under way by host, waiting ones included: the mean since the last call.

        As it is a mean, requests that came and went between two calls count as well.
        """
        means = {host: workers.demand.average() for host, workers in self._hosts.items()}
        return {host: mean for host, mean in means.items() if mean > 0}

    def learn(self, host: str, models: StepModels) -> None:
        """Step times of the host's engines from now on. The same object again changes nothing."""
        self._models[host] = models
        if host in self._hosts:
            self._hosts[host].learn(models)

    def hosts(self) -> list[str]:
        """The hosts that received requests."""
        return list(self._hosts)

    def views(self) -> dict[str, HostView]:
        """The views of all hosts that received requests. Other threads may call this, too."""
        return {host: _view(workers) for host, workers in list(self._hosts.items())}

    def close(self) -> None:
        for workers in self._hosts.values():
            workers.close()

    def _workers(self, host: str) -> HostWorkers:
        known = self._hosts.get(host)
        if known is not None:
            return known
        warming.begin()
        made = HostWorkers(host, self._find, self._max_queued, self._alive, self._rules, self._limits)
        if host in self._models:
            made.learn(self._models[host])
        self._hosts[host] = made
        return made


def _view(workers: HostWorkers) -> HostView:
    now_s = time.monotonic()
    waiting = {
        priority: WaitingRequests(count, 0.0 if since_s is None else max(0.0, now_s - since_s))
        for priority, (count, since_s) in workers.queue.backlog().items()
    }
    return HostView(waiting, workers.router.error)
