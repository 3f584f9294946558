"""The hook that Serve's controller calls when it starts, before it makes the actors that start HAProxy.

`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH` names `prepare`.
"""

from __future__ import annotations

from controlplane.runtime.patches.ray import haproxy_manager


def prepare() -> None:
    """Make this process's Serve controller create our actor from now on."""
    haproxy_manager.install()
