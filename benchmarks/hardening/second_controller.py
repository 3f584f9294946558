"""A second controller in a cluster that has one, as a new cluster on the same store has it.

python -m benchmarks.hardening.second_controller ADDRESS start|stop
"""

from __future__ import annotations

import sys

import ray
from ray import serve

from controlplane.runtime.app import ControllerReplica

REHEARSED_BY = "benchmarks.hardening"
APPLICATION = "second"
ROLE = f"ServeReplica:{APPLICATION}:Controller"


def main(address: str, what: str) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False)
    if what == "stop":
        serve.delete(APPLICATION)
        return
    second = ControllerReplica.options(ray_actor_options={"num_cpus": 0.1})  # type: ignore[attr-defined]
    serve.run(second.bind(), name=APPLICATION, route_prefix=None, blocking=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
