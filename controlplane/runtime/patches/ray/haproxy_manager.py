"""Serve's actor that starts HAProxy and tells it which gateways run, with the repair of `serve_news`.

Serve has no option for another class of this actor.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import haproxy

from controlplane.runtime.patches.ray.serve_news import keep_asking
from profiler.patches.target import Target

MANAGER = Target("ray.serve._private.controller", "HAProxyManager", read={"2.60": "a97f499f05ae"})
# The class that ours inherits from.
ACTOR = Target("ray.serve._private.haproxy", "HAProxyManager", read={"2.60": "e5c1705b3621"})

_OF_SERVE: Any = haproxy.HAProxyManager.__ray_metadata__.modified_class.__ray_actor_class__


class HAProxyManager(_OF_SERVE):  # type: ignore[misc]  # Ray has no types
    def __init__(self, *given: Any, **named: Any) -> None:
        keep_asking()
        super().__init__(*given, **named)


def install() -> None:
    """Make this process's Serve controller create our actor from now on."""
    MANAGER.replace(lambda _: ray.remote(num_cpus=0)(HAProxyManager))
