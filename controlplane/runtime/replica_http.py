"""A gateway's own HTTP server. HAProxy sends requests straight to it.

Serve's path into a replica (a request's metadata, two tasks, a queue, metrics, FastAPI's routes) takes longer
than all our work for an inference request. This server answers inference requests before that path; all other
requests take it. Serve's metrics count both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import ray
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.server import ServerState

from controlplane.api.early_refusal import EarlyRefusal, EarlyRefusals
from controlplane.api.inference.fast_path import InferenceFirst
from controlplane.runtime.front_door.sign_of_life import OFFSET, SignOfLife
from controlplane.runtime.loopback import LOOPBACK
from controlplane.runtime.patches.ray import replica_server
from workers.http1.limits import Limits
from workers.http1.server_connection import ServerConnection, Serving


def answer_first(inference: ASGIApp, early: EarlyRefusal) -> None:
    """Make this replica's server ask `early` and `inference` first, and write each answer at once.

    Called from a deployment's constructor, which Serve runs before it starts that server. Raises RuntimeError
    where Serve would run the application in another thread than the server: two threads would change shared
    data.
    """
    from ray.serve._private import constants

    if constants.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD:
        raise RuntimeError(
            "expected RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0, got 1; set this, or"
            " RAY_SERVE_THROUGHPUT_OPTIMIZED=1, for all processes of Ray (deploy/ray.env)"
        )

    server = _GatewayServer(inference, early)
    replica_server.install(lambda start: partial(server.start, start))


class _GatewayServer:
    """Starts the server of one gateway, as Serve does, around `inference` and Serve's own application."""

    def __init__(self, inference: ASGIApp, early: EarlyRefusal) -> None:
        self._inference = inference
        self._early = early

    async def start(self, start: Callable[..., Any], app: ASGIApp, options: Any, **more: Any) -> Any:
        """The task and the server that Serve's `start` makes of the application."""
        if ray.util.get_node_ip_address() == LOOPBACK:  # HAProxy, the only client, is on this machine
            options.host = LOOPBACK
        counted = Counted(self._inference, cast(Any, app).__self__._metrics_manager)
        life = _begin_life(options.host, options.port)
        try:
            task, server = await start(app, options, **more)
        except BaseException:
            life.close()
            raise
        config = server.config  # read when the task first runs
        config.app, config.proxy_headers = partial(self._application, config.app, counted), False
        config.http = cast(Any, connections_of(self._early))
        return task, server

    def _application(self, make: Callable[[], ASGIApp], counted: ASGIApp) -> ASGIApp:
        """Put ProxyHeadersMiddleware around Serve's application only; uvicorn would put it around all. Any
        caller of this port may state the client's address: HAProxy does, and the API's clients do not reach
        the port."""
        others = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, make()), "*"))
        return cast(ASGIApp, EarlyRefusals(InferenceFirst(others, counted), self._early))


def _begin_life(host: str, port: int) -> SignOfLife:
    """Raises RuntimeError where another process has the port, as Serve does: it then tries the next one."""
    try:
        return SignOfLife(host, port)
    except OSError as e:
        raise RuntimeError(
            f"the port {port + OFFSET}, on which the gateway answers health checks, is in use; free this port"
        ) from e


def connections_of(early: EarlyRefusal) -> Callable[..., ServerConnection]:
    """What uvicorn calls for each connection (`uvicorn.Config.http`). Most refusals on it cost no task."""

    def connection(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> ServerConnection:
        loop = _loop or asyncio.get_running_loop()
        serving = Serving(
            app=cast(Any, config.loaded_app),
            limits=Limits(idle_s=config.timeout_keep_alive),
            refuse=lambda scope: early.of(scope, loop.time()),
            default_headers=lambda: server_state.default_headers,
            state=app_state,
            connections=cast(Any, server_state.connections),
            tasks=server_state.tasks,
        )
        return ServerConnection(serving, loop)

    return connection


class ServeMetrics(Protocol):
    """The counts that Serve keeps of a replica's requests, for its metrics and its shutdown."""

    def record_request_metrics(
        self, *, route: str, latency_ms: float, is_error: bool, exception_type: str | None = None
    ) -> None: ...

    def inc_num_ongoing_requests(self, request_metadata: Any) -> None: ...

    def dec_num_ongoing_requests(self, request_metadata: Any) -> None: ...


class Counted:
    """An application whose requests Serve's metrics count as Serve's own: ongoing, ended, duration."""

    def __init__(self, app: ASGIApp, metrics: ServeMetrics) -> None:
        from ray.serve._private.common import RequestMetadata

        self._app = app
        self._metrics = metrics
        # Serve looks up a request's protocol. These requests have none of the protocols that Serve handles.
        self._request = RequestMetadata(request_id="", internal_request_id="")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s, failed = time.perf_counter(), ""
        self._metrics.inc_num_ongoing_requests(self._request)
        try:
            await self._app(scope, receive, send)
        except BaseException as e:
            failed = type(e).__name__
            raise
        finally:
            self._metrics.dec_num_ongoing_requests(self._request)
            self._metrics.record_request_metrics(
                route=scope["path"],
                latency_ms=1e3 * (time.perf_counter() - began_s),
                is_error=bool(failed),
                exception_type=failed or None,
            )
