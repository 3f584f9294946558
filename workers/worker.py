"""A worker: one engine, and the calls the control plane makes on it. Ray Serve runs it as a replica."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from workers import asgi, process_logs, wire
from workers.asgi import Message
from workers.door import Door, respond
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
        self._door: Door | None = None

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

    async def open_door(self, host: str, node_ip: str) -> None:
        """Serve requests over HTTP on a free port of `host`; `report` says where. Raises OSError."""
        self._door = Door(self.answer)
        await self._door.open(host, node_ip)

    async def answer(self, scope: Message, receive: Any, send: Any) -> None:
        """The engine's ASGI application, with the variant that a header names loaded first."""
        try:
            if (variant := wire.variant_of(scope["headers"])) is not None:
                await self.engine.ensure_variant(variant)
        except ValueError as e:
            body = json.dumps({"error": {"message": str(e), "code": "adapter_mismatch"}}).encode()
            await respond(send, 422, [(b"content-type", b"application/json")], body)
        else:
            await self.engine.app(scope, receive, send)

    async def call(self, call: EngineCall) -> EngineReply:
        """`answer` in this process, without a socket: one request as a whole."""
        return await asgi.call(self.answer, call)

    def stream(self, call: EngineCall) -> AsyncGenerator[EngineHead | bytes, None]:
        """The same piece by piece: an EngineHead, then bytes. Closing it cancels the request."""
        return asgi.stream(self.answer, call)

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
            address=self._door.address if self._door else "",
            secret=self._door.secret if self._door else "",
            max_ongoing_requests=self._config.max_ongoing_requests,
        )

    async def logs(self, lines: int, folder: str) -> str:
        """The last lines this process wrote, from the cluster's log folder."""
        return await asyncio.to_thread(process_logs.tail, Path(folder), os.getpid(), lines)

    async def check_health(self) -> None:
        if self._door is not None:
            self._door.check()
        await self.engine.check_health()

    async def close(self) -> None:
        """Let what the door let in end, then end the engine."""
        if self._door is not None:
            await self._door.close()
        if self._engine is not None:
            self._engine.close()
