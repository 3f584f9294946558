"""The way from NVML's and the kernel's figures to samples."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import networkx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.agent import host
from workers.agent.reports import ProcessMemory
from workers.agent.sampling import (
    OWN,
    GpuReading,
    HostReading,
    ProcessRow,
    cgroup_cores,
    cgroup_limit,
    cgroup_paths,
    cpu_work,
    gpu_samples,
    gpu_work,
    holder_of,
    host_sample,
    mean_work,
    nvlink_domains,
    of_ray_node,
)

GIB = 1 << 30
# init, a raylet, a replica, its engine core and a rank below it, a follower and its rank; another replica; a
# shell with a script.
TABLE = {
    1: ProcessRow(0, "/sbin/init"),
    10: ProcessRow(1, "/ray/raylet --name=model-x"),
    20: ProcessRow(10, "ray::ServeReplica:model-chat.v2:Engine.report"),
    21: ProcessRow(20, "VLLM::EngineCore"),
    22: ProcessRow(21, ""),
    30: ProcessRow(10, "ray::ServeReplica:ostinato:Controller"),
    23: ProcessRow(10, "/venv/bin/python -B -m workers.group.follower chat.v2"),
    24: ProcessRow(23, "VLLM::Worker_PP1"),
    40: ProcessRow(1, "bash"),
    41: ProcessRow(40, "python ray::ServeReplica:model-chat.v2:Engine"),
    50: ProcessRow(51, "a circle"),
    51: ProcessRow(50, "a circle"),
}


@pytest.mark.parametrize(
    ("pid", "holder"),
    [(pid, "chat.v2") for pid in (20, 21, 22, 24)] + [(30, ""), (41, ""), (50, ""), (1, ""), (99, None)],
)
def test_a_process_belongs_to_the_replica_above_it(pid: int, holder: str | None) -> None:
    assert holder_of(pid, TABLE) == holder


def test_an_engine_that_is_measured_belongs_to_its_profile() -> None:
    """The processes that `engine_runs` starts, with their descendants; not a process that only has the name
    in its arguments."""
    line = (
        "/venv/bin/python -m workers.measuring /h/job.json --end-with-stdin --holder=measuring:Llama-2x8_f.1"
    )
    table = TABLE | {
        70: ProcessRow(10, "ray::carry_out"),
        71: ProcessRow(70, line),
        72: ProcessRow(71, "VLLM::EngineCore"),
        73: ProcessRow(10, "/venv/bin/python -m workers.measuring /h/job.json --end-with-stdin"),
        74: ProcessRow(10, "grep --holder=measuring:Llama-2x8_f.1"),
    }
    holders = [holder_of(pid, table) for pid in (70, 71, 72, 73, 74)]
    assert holders == ["", "measuring:Llama-2x8_f.1", "measuring:Llama-2x8_f.1", "", ""]


def test_further_replicas_have_their_own_holders() -> None:
    table = TABLE | {25: ProcessRow(10, "ray::ServeReplica:model-chat.v2@12:Engine.report")}
    assert holder_of(25, table) == "chat.v2@12"


def test_engines_of_another_cluster_on_this_host_are_not_ours() -> None:
    theirs = {
        60: ProcessRow(1, "/other/ray/raylet --name=y"),
        61: ProcessRow(60, "ray::ServeReplica:model-chat.v2:Engine"),
        62: ProcessRow(61, "VLLM::EngineCore"),
    }
    seen = of_ray_node(TABLE | theirs, 30)
    assert seen.keys() == TABLE.keys() | theirs.keys()
    assert [holder_of(pid, seen) for pid in (20, 22, 24, 61, 62, 40)] == ["chat.v2"] * 3 + [""] * 3
    assert [holder_of(pid, of_ray_node(TABLE | theirs, 61)) for pid in (20, 61, 62)] == [
        "",
        "chat.v2",
        "chat.v2",
    ]


@pytest.mark.parametrize("pid", [41, 50, 99])
def test_outside_of_any_ray_node_all_engines_count(pid: int) -> None:
    assert of_ray_node(TABLE, pid) == TABLE


def test_gpus_are_sampled() -> None:
    readings = [
        GpuReading(0, "NVIDIA H200", 140 * GIB, 30 * GIB, 50, ((22, 20 * GIB), (99, GIB), (40, None))),
        GpuReading(2, "NVIDIA H200", 140 * GIB, GIB, 0, ((40, GIB), (40, GIB))),  # it computes and draws
    ]
    first, second = gpu_samples(readings, [(0, 2)], TABLE, {0: [0.0, 1.0]})
    assert (first.kind, first.total_bytes, first.used_bytes) == ("nvidia-h200", 140 * GIB, 30 * GIB)
    assert first.processes == (ProcessMemory(22, 20 * GIB, "chat.v2"), ProcessMemory(99, GIB, None))
    assert second.processes == (ProcessMemory(40, GIB, ""),)
    assert (first.utilisation, second.utilisation) == ((0.0, 1.0, 0.5), (0.0,))
    assert (first.nvlink_domain, second.nvlink_domain, second.index) == (0, 0, 2)


@given(
    indices=st.sets(st.integers(0, 9)).map(sorted),
    links=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
)
def test_nvlink_domains_are_connected_components(indices: list[int], links: list[tuple[int, int]]) -> None:
    found = nvlink_domains(indices, links)
    graph = networkx.Graph()
    graph.add_nodes_from(indices)
    graph.add_edges_from((a, b) for a, b in links if a in indices and b in indices)
    assert set(found) == set(indices)
    for a, b in combinations(indices, 2):
        assert (found[a] == found[b]) == networkx.has_path(graph, a, b)


def test_a_cpu_host_within_its_cgroups() -> None:
    reading = HostReading(64 * GIB, 50 * GIB, ((32 * GIB, 4 * GIB), (16 * GIB, 10 * GIB)), 25.0, 8)
    sample = host_sample(reading, TABLE, lambda pid: pid * GIB, [0.5])
    assert (sample.total_bytes, sample.used_bytes) == (16 * GIB, 10 * GIB)  # 6 GiB left in the smallest
    assert (sample.cores, sample.utilisation) == (8, (0.5, 0.25))
    assert sample.processes == tuple(ProcessMemory(pid, pid * GIB, "chat.v2") for pid in (20, 21, 22, 23, 24))


@given(
    total=st.integers(1, 100),
    available=st.integers(0, 120),
    limit=st.integers(1, 1000),
    use=st.integers(0, 200),
)
def test_free_memory_is_bounded_by_host_and_cgroup(total: int, available: int, limit: int, use: int) -> None:
    sample = host_sample(HostReading(total, available, ((limit, use),), 0.0, 1), {}, lambda _: 0, ())
    free = sample.total_bytes - sample.used_bytes
    assert sample.total_bytes == min(total, limit)
    assert 0 <= free == min(sample.total_bytes, max(0, min(available, limit - use)))


def test_cgroups_of_both_versions_are_read() -> None:
    """The cgroups of Debian with systemd, and of a container of version 1."""
    assert cgroup_paths("0::/system.slice/ray.service\n", "memory") == [
        ("2", "system.slice/ray.service"),
        ("2", "system.slice"),
        ("2", ""),
    ]
    text = "5:cpu,cpuacct:/docker/1a\n4:memory:/docker/1a\n"
    assert (
        cgroup_paths(text, "memory")
        == cgroup_paths(text, "cpu")
        == [
            ("1", "docker/1a"),
            ("1", "docker"),
            ("1", ""),
        ]
    )


def test_limits_of_cgroups_bound_the_memory() -> None:
    statistics = "anon 100\ninactive_file 300\nactive_file 50\n"
    assert cgroup_limit("1000\n", "700\n", statistics) == (1000, 400)
    assert cgroup_limit("1000\n", "700\n", statistics.replace("inactive", "total_inactive")) == (1000, 400)
    assert cgroup_limit("1000", "700", "") == (1000, 700)
    assert cgroup_limit("max\n", "700\n", statistics) is None
    assert cgroup_limit("", "", "") is None
    assert cgroup_cores("250000", "100000\n") == 2.5
    assert cgroup_cores("max", "100000\n") is None
    assert cgroup_cores("-1\n", "100000\n") is None


def test_this_host_is_sampled() -> None:
    """Against psutil, which reads the same of the kernel by other ways."""
    reading = host.read()
    assert reading.total_bytes == psutil.virtual_memory().total
    assert 0 < reading.cores <= (os.cpu_count() or 1)
    table = host.processes()
    assert table[os.getpid()].parent == os.getppid()
    assert table[os.getpid()].title == " ".join(psutil.Process().cmdline()).rstrip()


@pytest.mark.parametrize("title", ["plain", "it) has (brackets", "a title with spaces   "])
def test_a_process_of_any_name(title: str) -> None:
    """Its parent and its command line are what psutil says, also if it renamed itself."""
    rename = f"import setproctitle, sys; setproctitle.setproctitle({title!r})"
    script = f"{rename}; print('.', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == ".\n"
        row = host.processes()[child.pid]
        assert replace(row, cpu_s=0.0) == ProcessRow(
            os.getpid(), " ".join(psutil.Process(child.pid).cmdline()).rstrip()
        )
        assert row.title == title.rstrip()
        child.communicate("")
    assert child.pid not in host.processes()


def test_the_memory_of_a_process_leaves_out_files_it_maps(tmp_path: Path) -> None:
    """It has 64 MiB of its own and reads 256 MiB through a mapping, which counts in its RSS."""
    big = tmp_path / "weights"
    big.write_bytes(bytes(256 << 20))
    script = (
        "import mmap, sys\n"
        "own = bytearray(b'x') * (64 << 20)\n"
        f"file = open({str(big)!r}, 'rb')\n"
        "seen = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "total = sum(seen[i] for i in range(0, len(seen), 4096))\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        own, rss = host.memory_of(child.pid), psutil.Process(child.pid).memory_info().rss
        child.communicate("")
    assert rss > 320 << 20
    assert 64 << 20 <= own < 128 << 20
    assert host.memory_of(child.pid) == 0  # it ended


def test_cpu_time_is_counted_by_the_holder_of_the_processes() -> None:
    """Two seconds on four CPUs: an engine, a measurement, the control plane, and a foreign process."""
    measuring = "/venv/bin/python -m workers.measuring /h/job.json --end-with-stdin --holder=measuring:K"
    began = TABLE | {80: ProcessRow(10, measuring), 81: ProcessRow(80, "VLLM::EngineCore")}
    took_s = {21: 2.0, 22: 1.0, 30: 0.4, 80: 0.5, 81: 1.5, 40: 3.0}
    table = {pid: replace(row, cpu_s=100 + took_s.get(pid, 0.0)) for pid, row in began.items()}
    before = dict.fromkeys(began, 100.0)
    born = table | {82: ProcessRow(81, "a child", cpu_s=0.8)}
    assert cpu_work(before, born, 2.0, 4) == pytest.approx(
        {"chat.v2": 3 / 8, "measuring:K": (0.5 + 1.5 + 0.8) / 8, OWN: 0.4 / 8}
    )
    assert cpu_work({}, table, 2.0, 4) == {}  # the first look knows nothing of before


def test_a_gpu_is_kept_busy_by_its_only_holder() -> None:
    def work(percent: int, *pids: int) -> dict[str, float]:
        reading = GpuReading(0, "H200", 100, 50, percent, tuple((pid, 10) for pid in pids))
        return gpu_work(reading, TABLE)

    assert work(90, 21, 22) == {"chat.v2": 1.0}
    assert work(0, 21) == {}
    assert work(90, 21, 40) == work(90, 40) == work(90) == work(90, 21, 999) == {}


def test_work_is_a_mean_over_the_window() -> None:
    assert mean_work([{"a": 0.5}, {}, {"a": 1.0, "b": 0.2}, {}]) == (("a", 0.375), ("b", 0.05))


def test_a_process_that_computes_is_seen_to() -> None:
    """The kernel's count, for a process that is this one's child."""
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        row = host.processes()[child.pid]
        child.communicate("\n")
    assert row.cpu_s == pytest.approx(0.3, abs=0.2)
