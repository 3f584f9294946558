"""`ray start` with every process on 127.0.0.1: `python -m controlplane.ray_on_loopback start ...`.

Ray replaces a loopback address by the machine's own, except where its constant below says that nodes
cannot form clusters (its default on macOS). A local cluster has one node and should not be reachable.
"""

from __future__ import annotations

from typing import Any

LOOPBACK = "127.0.0.1"


def stay_on_loopback() -> None:
    """Make this process's Ray take 127.0.0.1 as it is; needed wherever a local cluster is joined."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def keep_replica_on_loopback() -> None:
    """On a node of loopback, bind this replica's gRPC port there too: Serve would take all interfaces.

    Called from a deployment's constructor, which Serve runs before it opens that port.
    """
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    bind = replica.add_port_to_grpc_server

    def bind_loopback(server: Any, address: str) -> int:
        port: int = bind(server, address.replace("[::]", LOOPBACK))
        return port

    replica.add_port_to_grpc_server = bind_loopback


def main() -> None:
    stay_on_loopback()
    from ray.scripts.scripts import main as ray_main

    ray_main()


if __name__ == "__main__":
    main()
