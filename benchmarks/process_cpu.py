"""The CPU time that each part of a cluster has used, and its memory, for benchmarks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import psutil

from controlplane.runtime.local import MARK, LocalCluster

REHEARSED_BY = "benchmarks.gateway"

# The part of a process's title that identifies it.
PARTS: Mapping[str, str] = {
    "proxy": "haproxy",
    "serve_proxy": "ProxyActor",
    "gateway": ":Gateway",
    "worker": ":Engine",
    "bare": ":Bare",
}
LOAD = "load"
OTHERS = "others"


class ClusterCpu:
    """CPU time of the processes of one cluster that run now, and of this one, which makes the load."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._parts = {LOAD: [psutil.Process(os.getpid())]}
        for process in _processes(cluster):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._parts.setdefault(_part(" ".join(process.cmdline())), []).append(process)

    def seconds(self) -> dict[str, float]:
        """User and system time so far, by part."""
        return {part: sum(map(_seconds, processes)) for part, processes in self._parts.items()}

    def resident_bytes(self) -> dict[str, int]:
        """Memory that each part has now."""
        return {part: sum(map(_resident_bytes, processes)) for part, processes in self._parts.items()}


def _processes(cluster: LocalCluster) -> set[psutil.Process]:
    """Those with the cluster's mark, and their descendants: Ray's workers rename themselves, which hides the
    mark."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get(MARK) == cluster.mark:
                found |= {process, *process.children(recursive=True)}
    return {process for process in found if process.pid != os.getpid()}


def _part(title: str) -> str:
    return next((part for part, sign in PARTS.items() if sign in title), OTHERS)


def _seconds(process: psutil.Process) -> float:
    """0 of one that has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _resident_bytes(process: psutil.Process) -> int:
    """0 of one that has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
