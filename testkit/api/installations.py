"""The gateway over real HTTP: uvicorn, SQLite, a controller and echo workers, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from prometheus_client import CollectorRegistry

from controlplane.api.app import create_app
from controlplane.api.request_limits import RequestLimits
from controlplane.api.services import Services
from controlplane.controller.controller import Controller
from controlplane.controller.leadership import Leadership
from controlplane.controller.metrics import ControllerMetrics
from controlplane.gateway.audit import AuditLog
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.rate_book import LARGE_BODY_BYTES, RateBook
from controlplane.gateway.route_book import RouteBook
from controlplane.gateway.tenants_book import TenantsBook
from controlplane.settings import Settings
from controlplane.state.repository import Repository
from controlplane.state.stores import own_store
from testkit.in_memory import InMemoryCluster


@dataclass
class Installation:
    """A running gateway; `http` talks to it."""

    settings: Settings
    files: Path
    cluster: InMemoryCluster = field(default_factory=InMemoryCluster)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    limits: RequestLimits = field(default_factory=RequestLimits)
    large_body_bytes: float = LARGE_BODY_BYTES

    def __post_init__(self) -> None:
        self.store = own_store(self.settings.resolved_store_url, self.cluster.installations)
        self.repository = Repository(self.store)
        self.metrics = Metrics(self.registry)
        self.services = Services(
            self.settings,
            self.repository,
            RouteBook(self.repository),
            self.cluster,
            self.metrics,
            TenantsBook(self.settings),
            AuditLog(self.settings, self.metrics.audit_lost),
            RateBook(large_body_bytes=self.large_body_bytes),
            self.limits,
        )
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.app = create_app(lambda: self.services)
        self.server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=1))
        key = self.settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Reading all authorities' certificates takes as long as most tests.
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=90, verify=False)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        metrics = ControllerMetrics(CollectorRegistry())
        leadership = Leadership(
            self.store, lambda store: Controller(self.settings, Repository(store), self.cluster, metrics)
        )
        self.controlling = asyncio.create_task(leadership.run())
        await self.server.serve(sockets=[self.socket])
        self.controlling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.controlling

    @contextlib.contextmanager
    def running(self) -> Iterator[Installation]:
        thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        thread.start()
        try:
            wait_for(lambda: self.server.started)
            yield self
        finally:
            self.http.close()  # first: a server that stops waits for open connections
            self.server.should_exit = True
            thread.join(60)
            self.store.close()
        assert not thread.is_alive()

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def end(self, accepted: httpx.Response) -> dict[str, Any]:
        """Wait for an operation, and return it when it is done."""
        assert accepted.status_code in (200, 202), accepted.text
        where = f"/operations/{accepted.json()['id']}"
        operation: dict[str, Any] = wait_for(lambda: (o := self.http.get(where).json())["done"] and o)
        return operation

    def register(self, name: str, base: str | None = None, folder: str = "") -> dict[str, Any]:
        path = str(self.files / (folder or name))
        where = {"base": base, "adapter": path} if base else {"source": path}
        return self.end(self.post("/register_model", {"model": name, **where}))

    def deploy(self, name: str, **options: Any) -> dict[str, Any]:
        return self.end(self.post("/deploy_model", {"model": name, **options}))

    def up(self, *variants: str) -> None:
        assert self.register("base")["phase"] == "Ready"
        assert self.deploy("base", maxOutputLength=32)["phase"] == "Deployed"
        for name in variants:
            assert self.register(name, "base")["phase"] == "Ready"
            assert self.deploy(name, maxOutputLength=32)["phase"] == "Deployed"

    def chat(self, text: str, model: str = "base", **options: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"model": model, "messages": messages, **options})

    def openai(self) -> openai.OpenAI:
        key = self.settings.api_key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=90)

    def records(self) -> tuple[Any, ...]:
        """The registered models, the deployments and the running operations."""
        state = self.repository.read()
        kinds = (state.models, state.deployments, state.operations)
        return tuple({key: found.record for key, found in kind.items()} for kind in kinds)

    def counts(self) -> dict[tuple[str, str], float]:
        return {
            (s.labels["model"], s.labels["code"]): s.value
            for metric in self.registry.collect()
            for s in metric.samples
            if s.name == "ostinato_requests_total"
        }

    def in_flight(self) -> float:
        found = [s.value for m in self.registry.collect() for s in m.samples if "in_flight" in s.name]
        return sum(found)


def wait_for(holds: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := holds()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
    return result


Start = Callable[..., Installation]
