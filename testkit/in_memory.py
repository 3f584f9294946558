"""A cluster in this process: what the controller and the gateway need of Ray Serve, with real workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from controlplane import errors
from controlplane.api.services import fresh_context
from controlplane.cluster.engine_status import EngineStatus, EngineView
from controlplane.cluster.inventory import NodeState
from controlplane.gateway.engine_errors import refused
from controlplane.management import commands
from controlplane.state import transactions
from controlplane.state.records import Operation
from controlplane.state.repository import Repository
from controlplane.state.worker_groups import base_of
from controlplane.traffic.request_terms import NO_TERMS, RequestTerms
from placement.types import Device, Inventory
from profiler.request_path import Burst
from profiler.types import DeviceRates
from workers.asgi import AsgiApp, Message
from workers.compression.recipe import CompressRequest
from workers.engine.echo import EchoEngine
from workers.fetching.messages import FetchRequest
from workers.fetching.process import FetchingError, carry_out
from workers.measuring.request import MeasureRequest
from workers.messages import (
    EngineCall,
    EngineConfig,
    EngineHead,
    EngineReply,
    EngineResidency,
    VariantRef,
    WorkerReport,
)
from workers.server.worker import Worker

GIB = 1 << 30
CPU = Device("node", 0, "cpu", 8 * GIB, 8 * GIB, DeviceRates(1e10, 1e11))
TWO_NODES = Inventory((CPU, replace(CPU, node="other")))
NO_TEMPLATE = (  # of vLLM, which quotes transformers
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat "
    "template if the tokenizer does not define one."
)
TOO_LONG = "This model's maximum context length is 64 tokens. However, you requested 99 tokens."


def submit(repository: Repository, command: Any, *args: Any) -> Operation:
    """One accepted request, as the gateway commits it."""
    ctx = fresh_context()
    return transactions.submit(repository, lambda state: command(state, *args, ctx)).operation


def cancel(repository: Repository, operation_id: str) -> Operation:
    ctx = fresh_context()
    decide = lambda state: commands.cancel_operation(state, operation_id, ctx.now_s)  # noqa: E731
    return transactions.submit(repository, decide).operation


@dataclass
class Engine:
    config: EngineConfig
    worker: Worker
    view: EngineView = field(default_factory=lambda: EngineView(EngineStatus.STARTING))
    loaded: dict[str, VariantRef] = field(default_factory=dict)


class ScriptedEngine(EchoEngine):
    """Echoes, except for prompts that ask for trouble; `closed` is set when a drip is cut off. Without a chat
    template it takes no messages."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.closed = asyncio.Event()
        self.release = asyncio.Event()
        self.calls: list[dict[str, Any]] = []
        self.refused: set[str] = set()
        self.faults: dict[str, Exception] = {}
        self.has_template = True

    async def ensure_variant(self, variant: VariantRef) -> None:
        if variant.name in self.faults:
            raise self.faults[variant.name]
        if variant.name in self.refused:
            raise ValueError(f"'{variant.name}' has a shape this engine cannot hold")
        await super().ensure_variant(variant)

    @property
    def app(self) -> AsgiApp:
        return self._scripted

    async def _scripted(self, scope: Message, receive: Any, send: Any) -> None:
        message: Message = await receive()
        request = json.loads(message["body"])
        self.calls.append(request)
        messages = request.get("messages")
        if messages is not None and not self.has_template:
            await _refuse(send, NO_TEMPLATE)
            return
        last = messages[-1] if isinstance(messages, list) and messages else None
        text = last.get("content") if isinstance(last, dict) else request.get("prompt", request.get("input"))
        script = {
            "!hang": self._hang,
            "!late": self._late,
            "!drip": self._drip,
            "!break": self._break,
            "!raise": self._raise,
            "!too long": self._too_long,
            "!nonsense": self._nonsense,
        }.get(text if isinstance(text, str) else "")
        if script is not None:
            await script(send)
            return

        async def again() -> Message:
            return message

        await self._serve(scope, again, send)

    async def _hang(self, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def _late(self, send: Any) -> None:
        """Sends its head only when it is told to, then drips."""
        await self.release.wait()
        await self._drip(send)

    async def _drip(self, send: Any) -> None:
        try:
            await send(_head(200, "text/event-stream"))
            while True:
                await send(_part(b'data: {"choices": []}\n\n'))
                await asyncio.sleep(0.02)
        finally:
            self.closed.set()

    async def _break(self, send: Any) -> None:
        await send(_head(200, "text/event-stream"))
        await send(_part(b'data: {"choices": [{"index": 0, "delta": {"content": "so far"}}]}\n\n'))
        raise RuntimeError("the engine core died")

    async def _raise(self, send: Any) -> None:
        raise RuntimeError("the engine core died")

    async def _too_long(self, send: Any) -> None:
        await _refuse(send, TOO_LONG)

    async def _nonsense(self, send: Any) -> None:
        await send(_head(200, "application/json"))
        await send(_part(b"[1]"))


async def _refuse(send: Any, message: str) -> None:
    await send(_head(400, "application/json"))
    await send(_part(json.dumps({"error": {"message": message, "code": 400}}).encode()))


def _head(status: int, content_type: str) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type.encode())],
    }


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


class ScriptedWorker(Worker):
    async def start(self) -> None:
        self._engine = ScriptedEngine(self._config)


class InMemoryCluster:
    """Implements `ClusterControl` for the controller and `ClusterAccess` for the API.

    An engine starts when it is observed, unless its launch is held; bases in `broken` fail to start.
    """

    def __init__(self, inventory: Inventory = Inventory((CPU,))) -> None:  # noqa: B008
        self.engines: dict[str, Engine] = {}
        self.devices = inventory
        self.broken: set[str] = set()
        self.refused: set[str] = set()
        self.faults: dict[str, Exception] = {}  # of loading, by variant
        self.loads: list[tuple[str, str]] = []  # asked for: group and variant
        self.held: set[str] = set()
        self.converting = asyncio.Event()
        self.bundled: Path | None = None
        self.fetches: list[tuple[str, str]] = []  # URI and node
        self.launches: list[str] = []
        self.looks = 0
        self.node_ids: dict[str, str] = {}  # Ray's, of nodes that were restarted
        self.requests: dict[str, int] | None = {}  # under way, as gateways would say
        self.heard = NO_TERMS  # of the last request
        self.refusal: errors.OstinatoError | None = None  # of all requests

    async def launch(self, config: EngineConfig) -> None:
        self.launches.append(config.group_name)
        present = {d.node for d in self.devices.devices}
        if gone := {r.node for r in config.ranks} - present:
            raise errors.Unavailable(f"the plan is for node {min(gone)}, which is gone")
        self.engines[config.group_name] = Engine(config, ScriptedWorker(config, "127.0.0.1"))

    async def stop(self, group: str) -> None:
        self.engines.pop(group, None)

    async def observe(self) -> dict[str, EngineView]:
        self.looks += 1
        for group_id, engine in list(self.engines.items()):
            if engine.view.status is EngineStatus.STARTING and group_id not in self.held:
                await self._start(group_id, engine)
        return {
            group_id: replace(engine.view, installation=engine.config.installation)
            for group_id, engine in self.engines.items()
        }

    def installations(self) -> set[str]:
        return {engine.config.installation for engine in list(self.engines.values())}

    async def _start(self, group_id: str, engine: Engine) -> None:
        if base_of(group_id) in self.broken:
            trace = "Traceback:\n  ...\nRuntimeError: out of memory\n"
            engine.view = EngineView(EngineStatus.FAILED, trace)
            return
        await engine.worker.start()
        self.scripted(group_id).refused = self.refused
        self.scripted(group_id).faults = self.faults
        engine.view = replace(engine.view, status=EngineStatus.RUNNING, replicas=1)

    def scripted(self, name: str) -> ScriptedEngine:
        found = self._engine(name).worker.engine
        assert isinstance(found, ScriptedEngine)
        return found

    def _engine(self, wanted: str) -> Engine:
        """The engine of a worker group by its name, or of any group of a base."""
        ours = [name for name in sorted(self.engines) if base_of(name) == wanted]
        if wanted not in self.engines and ours:
            return self.engines[ours[0]]
        if wanted not in self.engines:
            raise errors.Unavailable(f"the engine of '{wanted}' is not there", retry_after_s=5)
        return self.engines[wanted]

    async def load_variant(self, group: str, variant: VariantRef) -> None:
        self.loads.append((group, variant.name))
        engine = self._engine(group)
        try:
            await engine.worker.load_variant(variant)
        except ValueError as e:
            raise refused(e) from e
        engine.loaded[variant.name] = variant

    async def unload_variant(self, group: str, variant: VariantRef) -> None:
        if group in self.engines:
            await self.engines[group].worker.unload_variant(variant)
            self.engines[group].loaded.pop(variant.name, None)

    async def probe_path(self, base: str, group_ids: Sequence[str], max_tokens: int) -> list[Burst]:
        """As if the request path took 5 ms, and each that came with it half of one more."""
        self._engine(base)
        return [
            Burst(16 * length, tuple(5e-3 + 1e-6 * 16 * length + 1e-3 * k for k in range(batch)))
            for batch, length in ((1, 1), (1, 4), (8, 1))
            for _ in range(3)
        ]

    async def nodes(self, wait: bool = True) -> tuple[NodeState, ...]:
        names = sorted({d.node for d in self.devices.devices})
        usable = [
            NodeState(
                name,
                tuple(d for d in self.devices.devices if d.node == name),
                0.5,
                ids=(self.node_ids.get(name, "1"),),
            )
            for name in names
        ]
        unusable = [
            NodeState(u.node, (), 9.0, u.reason, u.lost, awaited=u.awaited) for u in self.devices.unusable
        ]
        return (*usable, *unusable)

    async def inventory(self) -> Inventory:
        return self.devices

    def demand(self) -> dict[str, float] | None:
        return None if self.requests is None else dict(self.requests)

    def measure(self, request: MeasureRequest, node: str) -> AsyncGenerator[str, None]:
        raise NotImplementedError("measured_cluster.py has a cluster that measures")

    def compress(self, request: CompressRequest, node: str) -> AsyncGenerator[str, None]:
        raise NotImplementedError("compressing_cluster.py has clusters that compress")

    async def fetch(self, request: FetchRequest, node: str) -> AsyncGenerator[str, None]:
        """A fetch in a process of its own, as on every node."""
        self.fetches.append((request.uri, node))
        lines = carry_out(request)
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                yield line
        except FetchingError as e:
            raise errors.Unavailable(str(e)) from e
        finally:
            with contextlib.suppress(ValueError):  # a thread still waits for a line
                lines.close()

    def convert_bundled(self, name: str) -> Path:
        if self.bundled is None:
            raise errors.SourceUnreadable(f"'{name}' is not installed")
        return self.bundled

    async def call(self, base: str, request: EngineCall, terms: RequestTerms = NO_TERMS) -> EngineReply:
        self.heard = terms
        if self.refusal is not None:
            raise self.refusal
        try:
            return await self._engine(base).worker.call(request)
        except errors.OstinatoError:
            raise
        except Exception as e:
            raise errors.EngineFailed(f"the engine of '{base}' failed: {e}") from e

    async def stream(
        self, base: str, request: EngineCall, terms: RequestTerms = NO_TERMS
    ) -> AsyncGenerator[EngineHead | bytes, None]:
        self.heard = terms
        try:
            async with contextlib.aclosing(self._engine(base).worker.stream(request)) as items:
                async for item in items:
                    if self.refusal is not None and isinstance(item, bytes):
                        raise self.refusal  # as one that comes too late to be told by a status
                    yield item
        except errors.OstinatoError:
            raise
        except Exception as e:
            raise errors.EngineFailed(f"the engine of '{base}' failed: {e}") from e

    async def reports(self, base: str) -> list[WorkerReport]:
        return [await self._engine(base).worker.report()]

    async def residency(self, base: str) -> list[EngineResidency]:
        return [await self._reached(base).worker.residency()]

    def _reached(self, base: str) -> Engine:
        """Serve does not reach one that starts."""
        engine = self._engine(base)
        if engine.view.status is EngineStatus.STARTING:
            raise errors.Unavailable(f"no engine of '{base}' is there; try again", retry_after_s=5)
        return engine

    async def limit_variants(self, base: str, limit: int) -> None:
        await self._reached(base).worker.limit_variants(limit)

    async def prefetch(self, base: str, variant: VariantRef) -> None:
        try:
            await self._reached(base).worker.prefetch(variant)
        except ValueError as e:
            raise refused(e) from e

    async def logs(self, base: str, lines: int) -> str:
        return "a line\n" * min(lines, 3)

    async def metrics_targets(self) -> list[tuple[str, str]]:
        return [("127.0.0.1:1", "gateway"), ("", "engine-none")]
