"""`ray start` with every one of its processes on 127.0.0.1: `python -m controlplane.ray_on_loopback start ...`.

Ray replaces a loopback address by the machine's own, except where its constant below says that nodes
cannot form clusters (its default on macOS). A local cluster has one node and should not be reachable.
"""

from __future__ import annotations


def main() -> None:
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    from ray.scripts.scripts import main as ray_main

    ray_main()


if __name__ == "__main__":
    main()
