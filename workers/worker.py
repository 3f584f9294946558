"""A worker: one engine, and the calls the control plane makes on it. Ray Serve runs it as a replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from workers import asgi, process_logs
from workers.engine import Engine, start_engine
from workers.messages import EngineCall, EngineConfig, EngineHead, EngineReply, VariantRef, WorkerReport
from workers.metrics_server import serve_metrics

log = logging.getLogger(__name__)


class Worker:
    """Stateless towards the control plane: each call names its variant, so a replica that was
    restarted loads what it is asked for."""

    def __init__(self, config: EngineConfig, metrics_host: str) -> None:
        self._config = config
        self._metrics_host = metrics_host
        self._metrics_address = ""
        self._engine: Engine | None = None

    async def start(self) -> None:
        """Start the engine. An exception here is a failed launch."""
        self._engine = await start_engine(self._config)
        self._metrics_address = serve_metrics(self._metrics_host)
        log.info("engine of %s is ready", self._config.name)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the worker was asked before its engine started")
        return self._engine

    async def call(self, call: EngineCall) -> EngineReply:
        """Answer one request as a whole."""
        if (refusal := await self._refusal(call.variant)) is not None:
            return EngineReply(422, "application/json", refusal)
        return await asgi.call(self.engine.app, call.path, call.body)

    async def stream(self, call: EngineCall) -> AsyncIterator[EngineHead | bytes]:
        """Answer one request piece by piece: an EngineHead, then bytes."""
        if (refusal := await self._refusal(call.variant)) is not None:
            yield EngineHead(422, "application/json")
            yield refusal
            return
        async with contextlib.aclosing(asgi.stream(self.engine.app, call.path, call.body)) as items:
            async for item in items:
                yield item

    async def _refusal(self, variant: VariantRef | None) -> bytes | None:
        if variant is None:
            return None
        try:
            await self.engine.ensure_variant(variant)
        except ValueError as e:
            return json.dumps({"error": {"message": str(e), "code": "adapter_mismatch"}}).encode()
        return None

    async def load_variant(self, variant: VariantRef) -> None:
        """Raises ValueError when the variant does not fit the engine."""
        await self.engine.ensure_variant(variant)

    async def unload_variant(self, variant: VariantRef) -> None:
        await self.engine.forget_variant(variant)

    async def report(self) -> WorkerReport:
        return WorkerReport(
            pid=os.getpid(),
            node=socket.gethostname(),
            variants=self.engine.variants(),
            engine_version=self.engine.version,
            metrics_address=self._metrics_address,
        )

    async def logs(self, lines: int, folder: str) -> str:
        """The last lines this process wrote, from the cluster's log folder."""
        return await asyncio.to_thread(process_logs.tail, Path(folder), os.getpid(), lines)

    async def check_health(self) -> None:
        await self.engine.check_health()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
