"""Keep a local cluster on 127.0.0.1.

Ray replaces a loopback address by the machine's own unless it is told that its nodes form no clusters. The
variable below tells this to every process that inherits it. The port that remains, Serve's for calls between
replicas, is bound by `keep_replica_on_loopback`.
"""

from __future__ import annotations

from controlplane.runtime.patches.ray import replica_port

LOOPBACK = "127.0.0.1"
# The name refers to the systems on which 0 is the default; Ray reads it everywhere.
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def keep_replica_on_loopback() -> None:
    """On a loopback node, bind this replica's gRPC port to loopback: Serve would use all interfaces.

    Called from a deployment's constructor, which Serve runs before it opens that port.
    """
    import ray

    if ray.util.get_node_ip_address() == LOOPBACK:
        replica_port.install(LOOPBACK)
