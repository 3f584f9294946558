"""A worker: one engine, and the control plane's calls to it. Ray Serve runs it as a replica."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from workers import asgi, request_headers
from workers.addresses import LOOPBACK, Ports
from workers.asgi import Message
from workers.bus.faults import LoadFailed
from workers.engine.factory import start_engine
from workers.engine.interface import Engine
from workers.engine.residency_cache import ResidencyWatch
from workers.engine.variant_metrics import VariantCollector
from workers.group.launch import Launch
from workers.messages import (
    EngineCall,
    EngineConfig,
    EngineHead,
    EngineReply,
    EngineResidency,
    VariantRef,
    WorkerReport,
)
from workers.server import process_logs
from workers.server.failed_requests import answered, nothing_known
from workers.server.http_server import Door, refuse, respond
from workers.server.load_feed import LoadFeed
from workers.server.loading_errors import respond_with
from workers.server.metrics_server import ANY, serve_metrics
from workers.server.wanted_variants import WantedVariants

log = logging.getLogger(__name__)

SCRAPE_WAIT_S = 2.0  # the longest wait of a scrape for the scheduler


class Worker:
    """A worker without state about variants: each call names its variant, so a restarted replica loads it on
    demand.
    """

    def __init__(
        self,
        config: EngineConfig,
        metrics_host: str,
        launch: Launch | None = None,
        metrics_ports: Ports = ANY,
        node_ip: str = LOOPBACK,
    ) -> None:
        """`launch` describes a group on several nodes; None: all ranks are on this node.

        `node_ip` is the address by which other nodes reach this one.
        """
        self._config = config
        self._launch = launch or Launch(config)
        self._metrics_host, self._metrics_ports, self._node_ip = metrics_host, metrics_ports, node_ip
        self._metrics_address = ""
        self._engine: Engine | None = None
        self._door: Door | None = None
        self._feed: LoadFeed | None = None
        self._wanted = WantedVariants(self.prefetch)
        self._limit: int | None = None
        self._marker = ""
        self._residency = ResidencyWatch(self._ask_residency)
        self._collector: VariantCollector | None = None

    async def start(self) -> None:
        """Start the engine. An exception here is a failed launch."""
        # First, as an engine takes long to start and there may be no free port.
        self._metrics_address = serve_metrics(self._metrics_host, self._metrics_ports, self._node_ip)
        self._engine = await start_engine(self._config, self._launch)
        if self._config.max_active_variants:
            await self.limit_variants(self._config.max_active_variants)
        self._publish_residency()
        log.info("engine of %s is ready", self._config.name)

    def abort(self, reason: str) -> None:
        """End the engine, or its start, as the group lost a member. Thread-safe."""
        self._launch.abort(reason)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the worker got a call before its engine started")
        return self._engine

    async def open_door(self, host: str) -> None:
        """Serve requests over HTTP on a free port of `host`; `report` has the address. Raises OSError."""
        self._feed = LoadFeed(self.engine.observer, self.residency)
        self._door = Door(self.answer, self._feed)
        await self._door.open(host, self._node_ip)

    async def answer(self, scope: Message, receive: Any, send: Any) -> None:
        """The engine's ASGI application; first it loads the variant that a header names.

        A failed engine accepts no request: gateways send the request elsewhere, before Ray has replaced this
        worker.
        """
        if self.engine.failed:
            await refuse(send, 503, "this worker's engine has failed")
            return
        variant = request_headers.variant_of(scope["headers"])
        if variant is not None and scope["path"] == request_headers.WANTED_PATH:
            self._wanted.add(variant)
            await respond(send, 202, [], b"")
            return
        if variant is None:
            await answered(
                lambda send: self.engine.app(scope, receive, send), send, nothing_known, self._lives
            )
            return
        try:
            await self._follow_limit(request_headers.limit_of(scope["headers"]))
            await self.engine.ensure_variant(variant)
            if self._feed is not None and self._feed.lacks(variant.uid):
                self._wanted.add(variant)  # it is read while vLLM tokenises its prompt
        except (ValueError, LoadFailed) as e:
            await respond_with(send, e)
        else:
            await answered(
                lambda send: self.engine.answer(variant, scope, receive, send),
                send,
                lambda: self.engine.load_failure(variant),
                self._lives,
            )

    def _lives(self) -> bool:
        return not self.engine.failed

    async def call(self, call: EngineCall) -> EngineReply:
        """Call `answer` in this process, without a socket, with one whole request."""
        return await asgi.call(self.answer, call)

    def stream(self, call: EngineCall) -> AsyncGenerator[EngineHead | bytes, None]:
        """The same as `call`, piece by piece: an EngineHead, then bytes. Closing it cancels the request."""
        return asgi.stream(self.answer, call)

    async def load_variant(self, variant: VariantRef) -> None:
        """Load a variant. Raises like `Engine.ensure_variant`."""
        await self.engine.ensure_variant(variant)

    async def unload_variant(self, variant: VariantRef) -> None:
        self._wanted.discard(variant.uid)
        await self.engine.forget_variant(variant)

    async def answer_at_once(self, marker: str) -> str:
        """Answer requests whose id contains `marker` without the engine, to measure the request path.

        Returns the marker until now: a worker that was restarted meanwhile has none.
        """
        before, self._marker = self._marker, marker
        self.engine.answer_at_once(marker)
        return before

    # --- residency -----------------------------------------------------------------------------

    async def prefetch(self, variant: VariantRef) -> None:
        """Load a variant into host memory. Raises like `Engine.ensure_variant`."""
        await self.engine.prefetch(variant)
        self._residency.forget()

    async def limit_variants(self, limit: int) -> int:
        """Run at most `limit` variants at once; returns the engine's actual limit."""
        self._limit = limit
        now = await self.engine.limit_variants(limit)
        self._residency.forget()
        log.info("%d variants may run at once (requested: %d)", now, limit)
        return now

    async def _follow_limit(self, limit: int | None) -> None:
        """Apply the deployment's limit that a request carries. A failure does not refuse the request."""
        if limit is None or limit == self._limit:
            return
        try:
            await self.limit_variants(limit)
        except TimeoutError:
            self._limit = None
            log.warning("the scheduler did not take the limit of %d variants in time", limit)

    async def residency(self) -> EngineResidency:
        """The engine's residency. Raises TimeoutError if the scheduler does not answer."""
        return await self._residency.get()

    async def _ask_residency(self) -> EngineResidency:
        return replace(await self.engine.residency(), node=socket.gethostname(), pid=os.getpid())

    def _publish_residency(self) -> None:
        loop, own_thread = asyncio.get_running_loop(), threading.get_ident()

        def ask() -> EngineResidency:
            if threading.get_ident() == own_thread:  # vLLM's own /metrics: the loop would wait for itself
                raise RuntimeError("this call would wait for its own event loop; call it from another thread")
            return asyncio.run_coroutine_threadsafe(self.residency(), loop).result(SCRAPE_WAIT_S)

        self._collector = VariantCollector(ask, self._config)
        REGISTRY.register(self._collector)

    async def report(self) -> WorkerReport:
        return WorkerReport(
            pid=os.getpid(),
            node=socket.gethostname(),
            variants=self.engine.variants(),
            engine_version=self.engine.version,
            metrics_address=self._metrics_address,
            address=self._door.address if self._door else "",
            secret=self._door.secret if self._door else "",
            proof=self._door.proof if self._door else "",
            local_name=self._door.local_name if self._door else "",
            max_ongoing_requests=self._config.max_ongoing_requests,
            ranks=self.engine.ranks,
            ongoing_requests=self._door.running if self._door else 0,
            group=self._config.group_name,
        )

    async def logs(self, lines: int, folder: str) -> str:
        """The last lines of this process in the cluster's log folder."""
        return await asyncio.to_thread(process_logs.tail, Path(folder), os.getpid(), lines)

    async def check_health(self) -> None:
        if self._door is not None:
            self._door.check()
        await self.engine.check_health()

    async def close(self) -> None:
        """Let accepted requests end, then end the engine."""
        if self._door is not None:
            await self._door.close()
        self._wanted.close()
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
            self._collector = None
        if self._engine is not None:
            self._engine.close()
