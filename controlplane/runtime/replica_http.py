"""How a gateway's own HTTP server answers, where HAProxy sends requests straight to it.

Serve's way into a replica (a request's metadata, two tasks, a queue, metrics, FastAPI's routes) takes longer
than all that we do with an inference request. These are answered before it; all else goes Serve's way.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from controlplane.api.inference.fast_path import InferenceFirst
from workers.server.gathered_writes import GatheringProtocol

log = logging.getLogger(__name__)


def answer_first(inference: ASGIApp) -> None:
    """Have the server of this replica ask `inference` first, and write each answer at once.

    Called from a deployment's constructor, which Serve runs before it starts that server. Behind Serve's own
    proxy a replica has none. A replica that stops lets these requests end: uvicorn waits for its connections.
    """
    from ray.serve._private import constants, replica

    if constants.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD:
        # The server has a loop of its own then: two threads would change what one of them reads.
        log.warning(
            "requests go through Serve: set RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0 to answer them first"
        )
        return
    start = replica.start_asgi_http_server

    async def start_ours(app: ASGIApp, options: Any, **more: Any) -> Any:
        task, server = await start(app, options, **more)
        config = server.config  # read when the task first runs
        make = config.app

        def ours_first() -> ASGIApp:
            """uvicorn would put this layer around all."""
            others = ProxyHeadersMiddleware(make(), config.forwarded_allow_ips)
            return InferenceFirst(cast(ASGIApp, others), inference)

        config.app, config.proxy_headers = ours_first, False
        config.http = GatheringProtocol
        return task, server

    replica.start_asgi_http_server = start_ours
