"""One Prometheus endpoint per process: what the process registered, vLLM's own metrics unchanged.

Scraping each process, rather than through the gateway's load balancer, keeps counters of different
replicas apart. The gateway lists the addresses for Prometheus (`GET /metrics/targets`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

PLAIN = "text/plain; version=0.0.4"


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


def serve_metrics(host: str) -> str:
    """Serve this process's metrics on a free port of `host`; returns "host:port"."""
    exposition = make_wsgi_app()

    def plain(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # In the OpenMetrics format, which Prometheus 2 prefers, prometheus_client 0.26 renames
        # vllm:num_requests_running to vllm_num_requests_running.
        environ["HTTP_ACCEPT"] = PLAIN
        body: Iterable[bytes] = exposition(environ, start_response)
        return body

    server = make_server(host, 0, plain, ThreadingWSGIServer, handler_class=_Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"{host}:{server.server_port}"
