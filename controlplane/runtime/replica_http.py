"""How a gateway's own HTTP server answers, where HAProxy sends requests straight to it.

Serve's way into a replica (a request's metadata, two tasks, a queue, metrics, FastAPI's routes) takes longer
than all that we do with an inference request. These are answered before it; all else goes Serve's way.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from controlplane.api.inference_path import InferenceFirst
from workers.server.gathered_writes import GatheringProtocol


def answer_first(inference: ASGIApp) -> None:
    """Have the server of this replica ask `inference` first, and write each answer at once.

    Called from a deployment's constructor, which Serve runs before it starts that server. Behind Serve's own
    proxy a replica has none. A replica that stops lets these requests end: uvicorn waits for its connections.
    """
    from ray.serve._private import replica

    start = replica.start_asgi_http_server

    async def start_ours(app: ASGIApp, options: Any, **more: Any) -> Any:
        # The last is the outermost. Serve hands over a copy for each try.
        options.middlewares.append(Middleware(InferenceFirst, inference=inference))
        task, server = await start(app, options, **more)
        server.config.http = GatheringProtocol  # read when the task first runs
        return task, server

    replica.start_asgi_http_server = start_ours
