"""Two hosts for one cluster, and a third that is none of its: network namespaces of this machine, joined by a
bridge. They need root."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import httpx
import psutil
from clusters import Cluster, until

from controlplane.runtime import local, loopback
from controlplane.runtime.local import LocalCluster
from tests.conftest import RedisServer

HEAD, OTHER, OUTSIDE = "one", "two", "outside"
START_S = 600.0


class HostPair(Cluster):
    """A cluster whose head node is on a host of its own; the other can be killed and started again.

    The state is in Redis, on the bridge; processes and files are this machine's.
    """

    def __init__(self, engine: str, allowed_roots: str, redis: Callable[..., RedisServer]) -> None:
        number = _claimed_bridge()
        self._net = f"198.18.{number}"  # set apart for tests of networks (RFC 2544)
        self._bridge = f"ost{number}"
        self._names = {HEAD: f"ost{number}a", OTHER: f"ost{number}b", OUTSIDE: f"ost{number}c"}
        self.addresses = {HEAD: f"{self._net}.1", OTHER: f"{self._net}.2", OUTSIDE: f"{self._net}.3"}
        self._connect()
        store = redis("--bind", "127.0.0.1", f"{self._net}.254", "--protected-mode", "no")
        super().__init__(
            engine,
            allowed_roots,
            store_url=f"redis://{self._net}.254:{store.port}/0",
            http_host="0.0.0.0",
            worker_host="0.0.0.0",
            metrics_host="0.0.0.0",
            engine_num_cpus=0.5,
        )

    # --- its life --------------------------------------------------------------------------------

    def _connect(self) -> None:
        _ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host, space in self._names.items():
            _ip("netns", "add", space)
            _ip("link", "add", f"{space}v", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", f"{space}v", "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")

    def disconnect(self) -> None:
        for space in self._names.values():
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def inside(self, host: str) -> tuple[str, ...]:
        """A command that runs another on this host."""
        return ("ip", "netns", "exec", self._names[host])

    def _run(self, host: str, *command: str) -> None:
        kept = local.cluster_environment(self.settings)
        environment = {n: v for n, v in kept.items() if n not in loopback.ENVIRONMENT}
        done = subprocess.run(
            [*self.inside(host), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start_node(self, host: str) -> None:
        """Ray gives a node 30 s to register; on a busy machine that takes more than one try."""
        for left in reversed(range(local.START_TRIES)):
            try:
                return self._start_node(host)
            except AssertionError as e:
                if left == 0 or "timed out during startup" not in str(e):
                    raise
                self.kill_node(host)
        return None

    def _start_node(self, host: str) -> None:
        here = [f"--node-ip-address={self.addresses[host]}", f"--node-name={host}", "--num-cpus=2"]
        if host == HEAD:
            here += ["--head", "--port=6379", f"--temp-dir={self.home}/ray", "--include-dashboard=false"]
        else:
            here.append(f"--address={self.addresses[HEAD]}:6379")
        self._run(
            host, *local.RAY, "start", "--disable-usage-stats", "--object-store-memory=100000000", *here
        )

    def up(self) -> float:
        """As its parent; the control plane is started on the head."""
        url = f"http://{self.addresses[HEAD]}:{self.settings.http_port}"
        address = f"{self.addresses[HEAD]}:6379"
        mark = local.cluster_environment(self.settings)[local.MARK]
        self.local = LocalCluster(str(self.home), url, "", address, f"{self.home}/ray", mark)
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self.start_node(HEAD)
        self.start_node(OTHER)
        self._run(HEAD, sys.executable, "-m", "controlplane.runtime.start_serve", address)
        until(lambda: self.http.get("/readyz").status_code == 200, "the API")
        return 0.0

    def discard(self) -> None:
        super().discard()
        self.disconnect()

    # --- its failures ----------------------------------------------------------------------------

    def kill_node(self, host: str) -> None:
        """Kill -9 all of a host's processes, as its power going off would."""
        while found := self._processes(host):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=5)

    def _processes(self, host: str) -> list[psutil.Process]:
        listed = _ip("netns", "pids", self._names[host]).split()
        return [psutil.Process(pid) for pid in map(int, listed) if psutil.pid_exists(pid)]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _claimed_bridge() -> int:
    """The number N of a bridge ostN, made here: what else runs on this machine cannot make it too."""
    for number in random.SystemRandom().sample(range(1, 251), 5):
        try:
            _ip("link", "add", f"ost{number}", "type", "bridge")
        except subprocess.CalledProcessError as e:
            last = e.stderr.strip()
        else:
            return number
    raise AssertionError(f"no bridge could be made: {last}")
