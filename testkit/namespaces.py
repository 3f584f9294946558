"""Hosts of one cluster: network namespaces of this machine, joined by a bridge. They need root."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress

import psutil

from controlplane.runtime import local, loopback
from controlplane.settings import Settings

START_S = 600.0


class Hosts:
    """Hosts by their names; processes and files are this machine's. `address` is this machine's to them."""

    def __init__(self, names: Iterable[str]) -> None:
        """Errors: RuntimeError, where no bridge can be made."""
        number = _claimed_bridge()
        net = f"198.18.{number}"  # set apart for tests of networks (RFC 2544)
        self.address = f"{net}.254"
        self._bridge = f"ost{number}"
        self._spaces = {name: f"ost{number}{'abcdefgh'[place]}" for place, name in enumerate(names)}
        self.addresses = {name: f"{net}.{place}" for place, name in enumerate(self._spaces, start=1)}
        try:
            self._connect()
        except BaseException:
            self.disconnect()
            raise

    def _connect(self) -> None:
        ip("addr", "add", f"{self.address}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for host, space in self._spaces.items():
            ip("netns", "add", space)
            ip("link", "add", f"{space}v", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{space}v", "master", self._bridge, "up")
            ip("-n", space, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")

    def disconnect(self) -> None:
        for space in self._spaces.values():
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", self._bridge)

    def inside(self, host: str) -> tuple[str, ...]:
        """A command that runs another on this host."""
        return ("ip", "netns", "exec", self._spaces[host])

    def kill(self, host: str) -> None:
        """Kill -9 all of a host's processes. Their connections break off, which those of a host without
        power do not."""
        while found := self._processes(host):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=5)

    def cut_off(self, host: str) -> None:
        """Cut off a host: no packets reach it or leave it, and no peer is told."""
        ip("link", "set", f"{self._spaces[host]}v", "down")

    def join(self, host: str) -> None:
        ip("link", "set", f"{self._spaces[host]}v", "up")

    def _processes(self, host: str) -> list[psutil.Process]:
        listed = map(int, ip("netns", "pids", self._spaces[host]).split())
        found = []
        for pid in listed:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def run(self, host: str, command: Iterable[str], environment: Mapping[str, str]) -> None:
        """Errors: RuntimeError, with all that it said, for a command that fails."""
        done = subprocess.run(
            [*self.inside(host), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def start_ray(self, host: str, options: Iterable[str], environment: Mapping[str, str]) -> None:
        """Ray gives a node 30 s to register; on a busy machine that takes more than one try."""
        named = (f"--node-ip-address={self.addresses[host]}", f"--node-name={host}")
        command = (
            *(*local.RAY, "start", "--disable-usage-stats", "--object-store-memory=100000000"),
            *named,
            *options,
        )
        for left in reversed(range(local.START_TRIES)):
            try:
                return self.run(host, command, environment)
            except RuntimeError as e:
                if left == 0 or "timed out during startup" not in str(e):
                    raise
                self.kill(host)
        return None


def environment_of(settings: Settings) -> dict[str, str]:
    """What a cluster's processes have that is on several hosts: its ports are not on 127.0.0.1."""
    kept = local.cluster_environment(settings)
    local.make_folder(kept[local.MARK])
    return {name: value for name, value in kept.items() if name not in loopback.ENVIRONMENT}


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _claimed_bridge() -> int:
    """The number N of a bridge ostN, made here: what else runs on this machine cannot make it too."""
    for number in random.SystemRandom().sample(range(1, 251), 5):
        try:
            ip("link", "add", f"ost{number}", "type", "bridge")
        except subprocess.CalledProcessError as e:
            last = e.stderr.strip()
        else:
            return number
    raise RuntimeError(f"no bridge could be made: {last}")
