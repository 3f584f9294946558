"""A replica's own server, started by Serve's function as Serve starts it."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from typing import Any

import httpx
import pytest
import ray

from controlplane.api.early_refusal import EarlyRefusal
from controlplane.runtime.replica_http import Counted, answer_first
from controlplane.settings import Settings
from controlplane.traffic.tenants import ONE_TENANT
from testkit.doors import HEAD, part
from testkit.redis_server import free_port
from workers.http1.server_connection import ServerConnection


def saying(text: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({**HEAD, "headers": []})
        await send(part(text, more=False))

    return app


SEPARATE = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"


EARLY = EarlyRefusal(Settings(), lambda: ONE_TENANT, lambda name, count: None)


class Metrics:
    """The layers of Serve's replica."""

    def __init__(self) -> None:
        self.ongoing, self.ended = 0, Counter[tuple[str, str | None]]()

    def record_request_metrics(
        self, *, route: str, latency_ms: float, is_error: bool, exception_type: str | None = None
    ) -> None:
        assert latency_ms >= 0
        assert is_error == bool(exception_type)
        self.ended[route, exception_type] += 1

    def inc_num_ongoing_requests(self, request_metadata: Any) -> None:
        self.ongoing += 1

    def dec_num_ongoing_requests(self, request_metadata: Any) -> None:
        self.ongoing -= 1


class Replica:
    def __init__(self) -> None:
        self._metrics_manager = Metrics()

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        await saying(b"Serve's")(scope, receive, send)


def test_serves_replica_has_what_we_count_in() -> None:
    """This fails with a Ray where it has another form."""
    from ray.serve._private.replica import Replica as OfServe
    from ray.serve._private.replica import ReplicaMetricsManager

    assert "self._metrics_manager = " in inspect.getsource(OfServe)
    assert inspect.iscoroutinefunction(OfServe._direct_ingress_asgi)
    for name in ("record_request_metrics", "inc_num_ongoing_requests", "dec_num_ongoing_requests"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Metrics, ReplicaMetricsManager))
        assert ours.parameters.keys() == theirs.parameters.keys()


def test_a_separate_thread_of_serve_for_our_code_is_refused_with_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.serve._private import constants

    monkeypatch.setattr(constants, SEPARATE, True)
    with pytest.raises(RuntimeError, match=SEPARATE):
        answer_first(saying(b"ours"), EARLY)


async def test_a_request_that_fails_counts_as_failed() -> None:
    metrics = Metrics()

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        assert metrics.ongoing == 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Counted(failing, metrics)({"path": "/v1/completions"}, None, None)  # type: ignore[arg-type]
    assert (metrics.ongoing, metrics.ended) == (0, {("/v1/completions", "ValueError"): 1})


async def test_inference_goes_before_what_is_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine's loopback, whatever the API listens on; and it counts in Serve's metrics."""
    from ray.serve._private import constants, replica
    from ray.serve._private.http_util import (
        configure_http_middlewares,
        configure_http_options_with_defaults,
    )
    from ray.serve.config import HTTPOptions

    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)
    monkeypatch.setattr(constants, SEPARATE, False)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    answer_first(saying(b"ours"), EARLY)
    options = configure_http_options_with_defaults(HTTPOptions(host="0.0.0.0", port=free_port()))
    serves = Replica()
    task, server = await replica.start_asgi_http_server(
        serves.answer,
        configure_http_middlewares(options),
        event_loop=asyncio.get_running_loop(),
        enable_so_reuseport=False,
    )
    try:
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (listening,) = server.servers[0].sockets
            assert listening.getsockname()[0] == "127.0.0.1"
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{options.port}", trust_env=False
            ) as http:
                for method, path, text in (
                    ("POST", "/v1/chat/completions", "ours"),
                    ("POST", "/v1/completions", "ours"),
                    ("GET", "/v1/completions", "Serve's"),
                    ("GET", "/-/healthz", "Serve's"),
                ):
                    reply = await http.request(method, path)
                    assert reply.text == text
                    assert len(reply.headers.get_list("x-request-id")) == 1
                assert {type(one) for one in server.server_state.connections} == {ServerConnection}
        counted = {("/v1/chat/completions", None): 1, ("/v1/completions", None): 1}
        assert (serves._metrics_manager.ongoing, serves._metrics_manager.ended) == (0, counted)
    finally:
        server.should_exit = True
        await task
