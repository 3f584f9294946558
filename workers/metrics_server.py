"""One Prometheus endpoint per process: what the process registered, vLLM's own metrics unchanged.

Scraping each process, rather than through the gateway's load balancer, keeps counters of different
replicas apart. The gateway lists the addresses for Prometheus (`GET /metrics/targets`).
"""

from __future__ import annotations

from prometheus_client import start_http_server


def serve_metrics(host: str) -> str:
    """Serve this process's metrics on a free port of `host`; returns "host:port"."""
    server, _ = start_http_server(0, addr=host)
    return f"{host}:{server.server_port}"
