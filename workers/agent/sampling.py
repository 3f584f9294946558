"""Samples from the readings of NVML and the kernel: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from profiler.types import CPU
from workers.agent.reports import DeviceSample, ProcessMemory
from workers.messages import from_file_name

# Ray Serve names a replica's process after its application, and the application after its worker group
# (`app_name`). The ranks of a group on other nodes descend from a process of `workers.group.follower`. The
# engine of a profiling job descends from a process of `workers.measuring`. A compression runs in a process of
# `workers.compression`. The command lines of the last two have the holder.
_REPLICA = re.compile(
    r"^ray::ServeReplica:model-([^:]+):|.* workers\.group\.follower (\S+)$"
    r"|.* workers\.measuring .* --holder=(measuring:\S+)$"
    r"|.* workers\.compression .* --holder=(compressing:\S+)$"
)

_RAYLET = re.compile(r"\S*/raylet( |$)")
# The holder of our work that belongs to no engine: the control plane's own processes.
OWN = "control-plane:"
BUSY_ABOVE = 0.01  # of a GPU's utilisation; less counts as idle


@dataclass(frozen=True)
class ProcessRow:
    """A process of this node: its parent, its command line or own title, and its CPU time (0 if unknown)."""

    parent: int
    title: str
    cpu_s: float = 0.0


@dataclass(frozen=True)
class GpuReading:
    """NVML's reading of a GPU. `processes` are (pid, bytes); bytes are None if the driver does not report
    them.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    utilisation_percent: int
    processes: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class HostReading:
    """The kernel's reading of the host; `limits` are (limit, use) in bytes of each of its cgroups."""

    total_bytes: int
    available_bytes: int
    limits: tuple[tuple[int, int], ...]
    utilisation_percent: float
    cores: float


def holder_of(pid: int, table: Mapping[int, ProcessRow]) -> str | None:
    """The holder of a process, by its own title or that of an ancestor.

    It is a worker group, a profiling job as `measuring:KEY`, or `compressing:MODEL`. "": none of ours. None:
    the process is not visible.
    """
    if pid not in table:
        return None
    for ancestor in _upwards(pid, table):
        if match := _REPLICA.match(table[ancestor].title):
            return from_file_name(next(filter(None, match.groups())))
    return ""


def worker_of(pid: int, table: Mapping[int, ProcessRow]) -> str:
    """The worker of a process: its holder (`holder_of`), OWN for other processes of this Ray node, "" for all
    others.
    """
    if holder := holder_of(pid, table):
        return holder
    return OWN if any(_RAYLET.match(table[ancestor].title) for ancestor in _upwards(pid, table)) else ""


def cpu_work(
    before: Mapping[int, float], table: Mapping[int, ProcessRow], seconds: float, cpus: int
) -> dict[str, float]:
    """The share of the host's CPUs that each of our workers used in the last `seconds`, by `worker_of`.

    `before`: the CPU time of each process at the start.
    """
    if not before or seconds <= 0:
        return {}
    work: dict[str, float] = {}
    for pid, row in table.items():
        taken_s = row.cpu_s - before.get(pid, 0.0)
        if taken_s > 0 and (worker := worker_of(pid, table)):
            work[worker] = work.get(worker, 0.0) + taken_s / seconds / cpus
    return work


def gpu_work(reading: GpuReading, table: Mapping[int, ProcessRow]) -> dict[str, float]:
    """The holder that kept a GPU busy; empty unless one holder alone uses the GPU."""
    holders = {holder_of(pid, table) for pid, _ in _known(reading.processes)}
    busy = _share(reading.utilisation_percent) > BUSY_ABOVE
    (only,) = holders if len(holders) == 1 else (None,)
    return {only: 1.0} if busy and only else {}


def mean_work(samples: Sequence[Mapping[str, float]]) -> tuple[tuple[str, float], ...]:
    """The mean work over all samples, by holder."""
    total: dict[str, float] = {}
    for sample in samples:
        for holder, share in sample.items():
            total[holder] = total.get(holder, 0.0) + share
    return tuple((holder, round(share / len(samples), 4)) for holder, share in sorted(total.items()))


def of_ray_node(table: Mapping[int, ProcessRow], pid: int) -> dict[int, ProcessRow]:
    """The table with titles only for processes of `pid`'s Ray node.

    Another cluster on this host may serve a base of the same name. If `pid` is in no Ray node, all keep their
    titles.
    """
    for ancestor in _upwards(pid, table):
        if _RAYLET.match(table[ancestor].title):
            return {
                p: row if ancestor in _upwards(p, table) else replace(row, title="")
                for p, row in table.items()
            }
    return dict(table)


def _upwards(pid: int, table: Mapping[int, ProcessRow]) -> Iterator[int]:
    """The process, its parent, and so on, each once: a table read while processes end may contain a cycle."""
    seen: set[int] = set()
    while pid in table and pid not in seen:
        yield pid
        seen.add(pid)
        pid = table[pid].parent


def gpu_samples(
    readings: Sequence[GpuReading],
    linked: Iterable[tuple[int, int]],
    table: Mapping[int, ProcessRow],
    history: Mapping[int, Sequence[float]],
) -> tuple[DeviceSample, ...]:
    """Samples of GPUs; `linked` are pairs of indices that NVLink joins, `history` earlier utilisation by
    index.
    """
    domains = nvlink_domains([r.index for r in readings], linked)
    return tuple(
        DeviceSample(
            index=r.index,
            kind=gpu_kind(r.name),
            total_bytes=r.total_bytes,
            used_bytes=min(r.used_bytes, r.total_bytes),
            utilisation=(*history.get(r.index, ()), _share(r.utilisation_percent)),
            processes=tuple(
                ProcessMemory(pid, taken, holder_of(pid, table)) for pid, taken in _known(r.processes)
            ),
            nvlink_domain=domains[r.index],
        )
        for r in readings
    )


def gpu_kind(name: str) -> str:
    """The kind of device, from the manufacturer's name for it."""
    return name.lower().replace(" ", "-")


def _known(processes: Iterable[tuple[int, int | None]]) -> list[tuple[int, int]]:
    """Each process once. NVML lists a process twice, with the same bytes, if it both computes and draws."""
    taken: dict[int, int] = {}
    for pid, count in processes:
        if count:
            taken[pid] = max(count, taken.get(pid, 0))
    return sorted(taken.items())


def host_sample(
    reading: HostReading,
    table: Mapping[int, ProcessRow],
    memory_of: Callable[[int], int],
    history: Sequence[float],
) -> DeviceSample:
    """A CPU host as one device. `memory_of` returns a process's bytes, and is called only for our
    processes.
    """
    owners = {pid: holder_of(pid, table) for pid in table}
    total = min([reading.total_bytes, *(limit for limit, _ in reading.limits)])
    room = min([reading.available_bytes, *(limit - use for limit, use in reading.limits)])
    return DeviceSample(
        index=0,
        kind=CPU,
        total_bytes=total,
        used_bytes=total - max(0, min(room, total)),
        utilisation=(*history, _share(reading.utilisation_percent)),
        processes=tuple(
            ProcessMemory(pid, memory_of(pid), owner) for pid, owner in sorted(owners.items()) if owner
        ),
        cores=reading.cores,
    )


def nvlink_domains(indices: Sequence[int], linked: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Each GPU's NVLink domain: the smallest index among all GPUs that it is joined to, directly or not."""
    domain = {index: index for index in indices}
    for a, b in linked:
        if a in domain and b in domain:
            low, high = sorted((domain[a], domain[b]))
            domain = {index: low if now == high else now for index, now in domain.items()}
    return domain


def parent_of(status: str) -> int:
    """The parent's pid, from /proc/PID/stat.

    The process's name, which may hold spaces and brackets, is followed by a letter and then the pid.
    """
    return int(status.rpartition(")")[2].split()[1])


def cpu_s_of(status: str, ticks_per_s: int) -> float:
    """The CPU time of a process, from /proc/PID/stat: `utime` and `stime`, fields 14 and 15."""
    fields = status.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / ticks_per_s


def command_line(text: str) -> str:
    """The command line from /proc/PID/cmdline. A process with its own title has spaces in place of zero
    bytes.
    """
    return text.rstrip("\0").replace("\0", " ").rstrip()


def resident_bytes(status: str) -> int:
    """The resident bytes of a process, from /proc/PID/status; 0 for a process that has ended.

    Files that it maps do not count: the kernel may drop them.
    """
    sizes = dict(re.findall(r"^(RssAnon|RssShmem):\s*(\d+) kB$", status, re.MULTILINE))
    return sum(int(kilobytes) for kilobytes in sizes.values()) << 10


def cgroup_paths(text: str, controller: str) -> list[tuple[str, str]]:
    """(version, path) of this process's cgroup under a controller and of each cgroup above it.

    They come from /proc/self/cgroup.
    """
    paths = []
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        version = "2" if number == "0" else "1" if controller in controllers.split(",") else ""
        parts = [part for part in path.split("/") if part]
        if version:
            paths += [(version, "/".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    return paths


def cgroup_limit(limit: str, use: str, statistics: str) -> tuple[int, int] | None:
    """(limit, use) in bytes of a memory cgroup; None without a limit.

    File pages that were not used lately count as free: the kernel drops them before it refuses memory.
    """
    if not limit.strip().isdecimal():  # "max", or the file does not exist
        return None
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", statistics, re.MULTILINE)
    reclaimable = int(match[1]) if match else 0
    return int(limit), max(0, int(use.strip() or 0) - reclaimable)


def cgroup_cores(quota: str, period: str) -> float | None:
    """The cores that a cgroup may keep busy; None without a limit ("max", -1, or missing files)."""
    if not quota.strip().isdecimal() or not period.strip().isdecimal():
        return None
    return int(quota) / int(period)


def _share(percent: float) -> float:
    return round(min(100.0, max(0.0, percent)) / 100, 4)
