"""The actor of Serve that starts HAProxy and tells it of gateways, with news of gateways that do not end.

Serve's controller calls `prepare` when it starts (`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`), before it
makes that actor. What the actor needs more: `controlplane.runtime.serve_news`.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import haproxy

from controlplane.runtime.serve_news import keep_asking

_OF_SERVE: Any = haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__


class HAProxyManager(_OF_SERVE):  # type: ignore[misc]  # Ray has no types
    def __init__(self, *given: Any, **named: Any) -> None:
        keep_asking()
        super().__init__(*given, **named)


def prepare() -> None:
    """Have the controller of this process make such actors from now on."""
    from ray.serve._private import controller

    controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)
