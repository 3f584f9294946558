"""Two hosts for one cluster, and a third that does not belong to it. They need root."""

from __future__ import annotations

import sys
from collections.abc import Callable

import httpx

from controlplane.runtime import local
from controlplane.runtime.local import LocalCluster
from testkit.cluster.clusters import Cluster, until
from testkit.namespaces import Hosts, environment_of
from testkit.redis_server import RedisServer

HEAD, OTHER, OUTSIDE = "one", "two", "outside"


class HostPair(Cluster):
    """A cluster whose head node has its own host; the other host can be killed and started again.

    The state is in Redis, on the bridge; processes and files are this machine's.
    """

    def __init__(self, engine: str, allowed_roots: str, redis: Callable[..., RedisServer]) -> None:
        self._hosts = Hosts((HEAD, OTHER, OUTSIDE))
        self.addresses, self.inside = self._hosts.addresses, self._hosts.inside
        store = redis("--bind", "127.0.0.1", self._hosts.address, "--protected-mode", "no")
        super().__init__(
            engine,
            allowed_roots,
            store_url=f"redis://{self._hosts.address}:{store.port}/0",
            http_host="0.0.0.0",
            worker_host="0.0.0.0",
            metrics_host="0.0.0.0",
        )

    # --- its life --------------------------------------------------------------------------------

    def start_node(self, host: str) -> None:
        here = ["--num-cpus=2"]
        if host == HEAD:
            here += ["--head", "--port=6379", f"--temp-dir={self.home}/ray", "--include-dashboard=false"]
        else:
            here.append(f"--address={self.addresses[HEAD]}:6379")
        self._hosts.start_ray(host, here, environment_of(self.settings))

    def up(self) -> float:
        """As its parent; the control plane is started on the head."""
        url = f"http://{self.addresses[HEAD]}:{self.settings.http_port}"
        address = f"{self.addresses[HEAD]}:6379"
        mark = local.cluster_environment(self.settings)[local.MARK]
        self.local = LocalCluster(str(self.home), url, "", address, f"{self.home}/ray", mark)
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.start_node(HEAD)
        self.start_node(OTHER)
        command = (sys.executable, "-m", "controlplane.runtime.start_serve", address)
        self._hosts.run(HEAD, command, environment_of(self.settings))
        until(lambda: self.http.get("/readyz").status_code == 200, "the API")
        return 0.0

    def discard(self) -> None:
        super().discard()
        self._hosts.disconnect()

    # --- its failures ----------------------------------------------------------------------------

    def kill_node(self, host: str) -> None:
        """End a host as a power failure would, except that its connections are closed."""
        self._hosts.kill(host)
