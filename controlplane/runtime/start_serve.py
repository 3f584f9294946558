"""Start Ray Serve and our application on a Ray cluster: `python -m controlplane.runtime.start_serve`.

Serve waits 60 s for its proxies, twice, and has no setting to wait longer. On a busy machine the proxies come
later. A late proxy is no failure here: the caller waits until the API answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from controlplane.runtime.app import build
from controlplane.runtime.serve import CONTROL_APP
from controlplane.settings import Settings


def start(address: str, settings: Settings) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False)
    options = HTTPOptions(host=settings.http_host, port=settings.http_port, request_timeout_s=None)
    if not _in_time(lambda: serve.start(http_options=options)):
        serve.start(http_options=options)  # finds the started controller
    _in_time(lambda: serve.run(build(), name=CONTROL_APP, route_prefix="/", blocking=False))


def _in_time(step: Callable[[], object]) -> bool:
    """Tell whether Serve's proxies came in time. The step is done in both cases."""
    try:
        step()
    except TimeoutError as e:
        print(f"{e} The missing replicas may still start.", flush=True)
        return False
    return True


if __name__ == "__main__":
    start(sys.argv[1], Settings())
