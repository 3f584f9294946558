"""Close Serve's Python proxy on the head.

Behind HAProxy Serve still starts this proxy, for applications that scale to zero; ours never do. It would be
a second entry without HAProxy's limits. Serve calls `prepare` before the proxy listens; the proxy then ends
each connection. Serve also calls `prepare` before a gateway listens; there it changes nothing.
"""

from __future__ import annotations

from typing import Any

from controlplane.runtime.patches.uvicorn import closed_proxy


def prepare() -> list[Any]:
    """Return no middlewares; Serve asks for them (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`)."""
    if not _is_replica():
        closed_proxy.install()
    return []


def _is_replica() -> bool:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True
