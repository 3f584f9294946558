"""A cluster as the chart makes one: a head without engines, whose control store is kept in Redis, and two
nodes with room for a gateway, a proxy of Serve's and an engine each. Each is a host of its own."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from controlplane.runtime import local
from controlplane.runtime.local import LocalCluster
from controlplane.settings import Settings
from testkit.namespaces import Hosts, environment_of
from testkit.redis_server import RedisServer

HEAD, NODES = "head", ("one", "two")
PORT = 6379
READY_S = 600.0
Progress = Callable[[str], None]


class ThreeHosts:
    """`up` and `down` as `controlplane.runtime.local` has them. Hosts can be killed, and come back."""

    def __init__(self, folder: Path) -> None:
        self.hosts = Hosts((HEAD, *NODES))
        # Ray's sockets lie in it, whose paths may not be long.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="ost-", dir="/tmp"))
        try:
            self.redis, self._gcs_redis = (self._redis(folder / name) for name in ("redis", "gcs"))
        except BaseException:
            self.hosts.disconnect()
            raise
        self.settings = {
            "store_url": f"redis://{self.hosts.address}:{self.redis.port}/0",
            "http_host": "0.0.0.0",
            "worker_host": "0.0.0.0",
            "metrics_host": "0.0.0.0",
            "dashboard": False,
            "gateways_per_node": 1,
        }
        self._environment: dict[str, str] = {}
        self.urls: tuple[str, ...] = ()

    def close(self) -> None:
        for server in (self.redis, self._gcs_redis):
            server.stop()
        self.hosts.disconnect()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def up(self, settings: Settings, progress: Progress) -> LocalCluster:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._environment = {
            **environment_of(settings),
            "RAY_REDIS_ADDRESS": f"{self.hosts.address}:{self._gcs_redis.port}",
            "RAY_external_storage_namespace": "ostinato",
        }
        for host in (HEAD, *NODES):
            progress(f"starting a Ray node on host {host}")
            self.start(host)
        progress("deploying the control plane on Ray Serve")
        address = f"{self.hosts.addresses[HEAD]}:{PORT}"
        command = (sys.executable, "-m", "controlplane.runtime.start_serve", address)
        self.hosts.run(HEAD, command, self._environment)
        self.urls = tuple(f"http://{self.hosts.addresses[node]}:{settings.http_port}" for node in NODES)
        for url in self.urls:
            _wait_ready(url)
        mark = self._environment[local.MARK]
        return LocalCluster(str(settings.home), self.urls[0], "", address, str(self._temp_dir), mark)

    def down(self, settings: Settings, progress: Progress) -> bool:
        return local.end_leftovers(settings, progress)

    def start(self, host: str) -> None:
        if host == HEAD:
            self._forget_head()
            options = ("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
            self.hosts.start_ray(host, (*options, f"--temp-dir={self._temp_dir}"), self._environment)
        else:
            self.hosts.start_ray(
                host, (f"--address={self.hosts.addresses[HEAD]}:{PORT}", "--num-cpus=2"), self._environment
            )

    def _forget_head(self) -> None:
        """A note of where the last one was, which a host of its own would not have kept."""
        for folder in (self._temp_dir, Path(self._environment["RAY_TMPDIR"])):
            (folder / "ray_current_cluster").unlink(missing_ok=True)

    def _redis(self, folder: Path) -> RedisServer:
        folder.mkdir()
        return RedisServer(folder, "--bind", "127.0.0.1", self.hosts.address, "--protected-mode", "no")


def _wait_ready(url: str) -> None:
    """Errors: TimeoutError."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"expected {url}/readyz to answer within {READY_S:.0f} s")
