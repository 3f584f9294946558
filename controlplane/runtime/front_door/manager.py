"""Serve's actor that starts HAProxy and tells it which gateways run, with a repair for lost news of gateways.

Serve's controller calls `prepare` when it starts (`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`), before it
makes that actor. The repair: `controlplane.runtime.serve_news`.
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
    """Make this process's Serve controller create our actor from now on."""
    from ray.serve._private import controller

    controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)
