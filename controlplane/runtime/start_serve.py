"""Starts Ray Serve and our application on a Ray cluster: `python -m controlplane.runtime.start_serve`."""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from controlplane.runtime.app import build
from controlplane.runtime.serve import CONTROL_APP
from controlplane.settings import Settings


def start(address: str, settings: Settings) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False)
    options = HTTPOptions(host=settings.http_host, port=settings.http_port, request_timeout_s=None)
    _start_serve(options)
    serve.run(build(), name=CONTROL_APP, route_prefix="/", blocking=False)


def _start_serve(options: HTTPOptions) -> None:
    """Serve waits 60 s for its proxy, and cannot be told to wait longer. On a busy machine the proxy comes
    later all the same, so what was started is taken as it is: who asks for the API waits for it anyway."""
    try:
        serve.start(http_options=options)
    except TimeoutError as e:
        print(f"{e} Going on with what is there.", flush=True)
        serve.start(http_options=options)


if __name__ == "__main__":
    start(sys.argv[1], Settings())
