"""The host, as the kernel reports it: processes, memory, cgroups, cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from workers.agent.sampling import (
    HostReading,
    ProcessRow,
    cgroup_cores,
    cgroup_limit,
    cgroup_paths,
    command_line,
    cpu_s_of,
    of_ray_node,
    parent_of,
    resident_bytes,
)

_CGROUPS = Path("/sys/fs/cgroup")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
# (folder, limit, use) by the version of cgroups, below _CGROUPS.
_MEMORY = {
    "1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "2": ("", "memory.max", "memory.current"),
}


def processes() -> dict[int, ProcessRow]:
    """Every visible process, by pid. Only processes of this Ray node have titles."""
    return of_ray_node(dict(_rows()), os.getpid())


def _rows() -> Iterator[tuple[int, ProcessRow]]:
    """Each process by its pid.

    /proc is read directly if it exists: this runs every second, and psutil takes three times as long, since
    it opens five files per process.
    """
    if not Path("/proc/self/stat").exists():
        for process in psutil.process_iter(["ppid", "cmdline"]):
            yield process.pid, ProcessRow(process.info["ppid"] or 0, " ".join(process.info["cmdline"] or ()))
        return
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if (status := _of_process(pid, "stat")) is not None:
            title = command_line(_of_process(pid, "cmdline") or "")
            cpu_s = cpu_s_of(status, _TICKS_PER_S) if status else 0.0
            yield int(pid), ProcessRow(parent_of(status) if status else 0, title, cpu_s)


def _of_process(pid: str, name: str) -> str | None:
    """A file of /proc; None for a process that has ended; "" for one that this user may not read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.readall().decode(errors="replace")
    except PermissionError:
        return ""
    except OSError:
        return None


def memory_of(pid: int) -> int:
    """The memory of a process in bytes; 0 for a process that has ended."""
    status = Path(f"/proc/{pid}/status")
    if Path("/proc/self/status").exists():
        return resident_bytes(_text(status))
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def read() -> HostReading:
    """The current state of the host. Utilisation is the mean since the last call."""
    memory = psutil.virtual_memory()
    return HostReading(
        total_bytes=int(memory.total),
        available_bytes=int(memory.available),
        limits=_limits(),
        utilisation_percent=psutil.cpu_percent(),
        cores=_cores(),
    )


def _limits() -> tuple[tuple[int, int], ...]:
    """Memory limits of this process's cgroup and of those above it. A container sees its own as the root."""
    limits = []
    for version, path in cgroup_paths(_text(Path("/proc/self/cgroup")), "memory"):
        mount, limit, use = _MEMORY[version]
        texts = [_text(_CGROUPS / mount / path / name) for name in (limit, use, "memory.stat")]
        if (memory_limit := cgroup_limit(*texts)) is not None:
            limits.append(memory_limit)
    return tuple(limits)


def _cores() -> float:
    """The number of cores that this process may use, by its affinity and its cgroups' limits."""
    limits = [
        float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    ]
    for version, path in cgroup_paths(_text(Path("/proc/self/cgroup")), "cpu"):
        if version == "2":
            quota, _, period = _text(_CGROUPS / path / "cpu.max").partition(" ")
        else:
            folder = _CGROUPS / "cpu" / path
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if (cores := cgroup_cores(quota, period)) is not None:
            limits.append(cores)
    return min(limits)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file, or the process has ended
        return ""
