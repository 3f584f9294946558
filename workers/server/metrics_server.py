"""One Prometheus endpoint per process: the process's own metrics, and vLLM's unchanged.

Scraping each process, rather than through the gateway's load balancer, keeps counters of different replicas
apart. The gateway lists the addresses for Prometheus (`GET /metrics/targets`). Ports come from a fixed range,
for firewalls.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from workers.addresses import LOOPBACK, Ports, family_of, reached_at

PLAIN = "text/plain; version=0.0.4"
ANY = Ports()


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""


class _Server(ThreadingWSGIServer):
    allow_reuse_port = False  # True in some Pythons: two processes would share a port, and scrapes

    def __init__(self, host: str, port: int) -> None:
        self.address_family = family_of(host)
        super().__init__((host, port), _Quiet)


def serve_metrics(host: str, ports: Ports = ANY, node_ip: str = LOOPBACK) -> str:
    """Serve this process's metrics on the first of `ports` that is free on `host`.

    Returns "ip:port" as other nodes reach it; `node_ip` is this node's address. Raises OSError if it cannot
    listen on `host`, or none of these ports is free.
    """
    exposition = make_wsgi_app()

    def plain(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # In the OpenMetrics format, which Prometheus 2 prefers, prometheus_client 0.26 renames
        # vllm:num_requests_running to vllm_num_requests_running.
        environ["HTTP_ACCEPT"] = PLAIN
        body: Iterable[bytes] = exposition(environ, start_response)
        return body

    server = _listen(host, ports)
    server.set_app(plain)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return reached_at(host, server.server_port, node_ip)


def _listen(host: str, ports: Ports) -> _Server:
    """Reserve a port by listening on it, so that two processes never get the same."""
    for port in ports.each():
        try:
            return _Server(host, port)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no port for metrics is free on {host}: {ports} are all in use; set OSTINATO_METRICS_PORTS to more "
        "ports",
    )
