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
    serve.start(http_options=options)
    serve.run(build(), name=CONTROL_APP, route_prefix="/", blocking=False)


if __name__ == "__main__":
    start(sys.argv[1], Settings())
