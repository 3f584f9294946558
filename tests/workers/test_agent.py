"""The agent of a node: on this host, and on one whose driver, through real bindings, answers from a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.agent.agent import Agent
from workers.agent.reports import AgentOptions, AgentReport

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
# Reports on demand: a line of JSON for every line it reads.
AGENT = """
import dataclasses, json, sys
from workers.agent.agent import Agent
from workers.agent.reports import AgentOptions
gpus = json.loads(sys.argv[1])
agent = Agent(AgentOptions(None if gpus is None else tuple(gpus), 3, 0.05))
for _ in sys.stdin:
    print(json.dumps(dataclasses.asdict(agent.report())), flush=True)
"""


def until(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.02)
    raise AssertionError("nothing came of it")


def test_a_host_is_one_device_and_its_samples_are_a_window() -> None:
    agent = Agent(AgentOptions(None, window=3, every_s=0.01))

    def full() -> AgentReport | None:
        report = agent.report()
        return report if report.devices and len(report.devices[0].utilisation) == 3 else None

    report = until(full)
    (host,) = report.devices
    assert (report.pid, report.problem, host.kind) == (os.getpid(), "", "cpu")
    assert host.total_bytes <= psutil.virtual_memory().total
    assert 0 < host.used_bytes < host.total_bytes
    assert all(0 <= sample <= 1 for sample in host.utilisation)
    assert report.age_s < 60


class Driver:
    """A host with GPUs, and an agent on it in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        built = ["cc", "-w", "-shared", "-fPIC", str(Path(__file__).with_name("nvml_driver.c"))]
        subprocess.run([*built, "-o", str(folder / "libnvidia-ml.so.1")], check=True)
        self.agent: subprocess.Popen[str]

    def says(self, text: str) -> None:
        new = self.state.with_suffix(".new")
        new.write_text(text)
        new.replace(self.state)

    def start(self, gpus: list[int] | None = None) -> None:
        environment = {"LD_LIBRARY_PATH": str(self.folder), "NVML_STATE": str(self.state)}
        self.agent = subprocess.Popen(
            [sys.executable, "-c", AGENT, json.dumps(gpus)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def report(self) -> dict[str, Any]:
        assert self.agent.stdin is not None
        assert self.agent.stdout is not None
        self.agent.stdin.write("\n")
        self.agent.stdin.flush()
        answer: dict[str, Any] = json.loads(self.agent.stdout.readline())
        return answer

    def until(self, holds: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            report = self.report()
            return report if holds(report) else None

        found: dict[str, Any] = until(look)
        return found


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    if shutil.which("cc") is None:
        pytest.fail("cc is missing, which builds the driver these tests ask; install it: apt-get install gcc")
    made = Driver(tmp_path)
    yield made
    made.agent.kill()
    made.agent.communicate()


@pytest.fixture
def engine() -> Iterator[int]:
    """The pid of a process that looks like an engine's replica."""
    title = "ray::ServeReplica:model-chat:Engine"
    with subprocess.Popen([title, "600"], executable=shutil.which("sleep")) as process:
        yield process.pid
        process.kill()


@pytest.mark.slow
def test_gpus_with_their_processes_and_nvlink_domains(driver: Driver, engine: int) -> None:
    unseen = 4_194_305  # above the largest pid there can be
    driver.says(
        f"3  {140 * GIB} {100 * GIB} 50 0 3  {engine} {30 * GIB} {os.getpid()} {4 * GIB} {unseen} {GIB}\n"
        f"{140 * GIB} {139 * GIB} 0 7 0   {140 * GIB} {139 * GIB} 0 0 0"
    )
    driver.start()
    report = driver.until(lambda r: r["devices"] and len(r["devices"][0]["utilisation"]) == 3)
    first, second, third = report["devices"]
    assert (first["kind"], first["total_bytes"], first["used_bytes"]) == ("nvidia-h200", 140 * GIB, 40 * GIB)
    assert first["utilisation"] == [0.5, 0.5, 0.5]
    holders = {p["pid"]: (p["memory_bytes"], p["holder"]) for p in first["processes"]}
    assert holders == {engine: (30 * GIB, "chat"), os.getpid(): (4 * GIB, ""), unseen: (GIB, None)}
    assert (first["nvlink_domain"], second["nvlink_domain"], third["nvlink_domain"]) == (0, 1, 0)
    driver.says(f"3  {140 * GIB} {GIB} 100 0 0  {140 * GIB} {GIB} 0 7 0  {140 * GIB} {GIB} 0 0 0")
    changed = driver.until(lambda r: r["devices"][0]["used_bytes"] == 139 * GIB)
    assert changed["devices"][0]["processes"] == []


@pytest.mark.slow
def test_only_our_gpus_are_sampled_without_values_that_the_driver_lacks(driver: Driver) -> None:
    driver.says(f"2  {GIB} {GIB} 0 0 0  {GIB} 0 -1 -1 0")
    driver.start(gpus=[1])
    (only,) = driver.until(lambda r: r["devices"])["devices"]
    assert (only["index"], only["used_bytes"], set(only["utilisation"])) == (1, GIB, {0.0})


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_named(driver: Driver) -> None:
    driver.says(f"1  {GIB} {GIB} 0 0 0")
    driver.start(gpus=[0, 5])
    problem = driver.until(lambda r: r["problem"])["problem"]
    assert "GPU 5 does not exist, because this node has 1" in problem


@pytest.mark.slow
def test_a_lost_gpu_is_a_problem_until_it_is_back(driver: Driver) -> None:
    """The last sample stays, and its age shows that it is old."""
    driver.says(f"1  {GIB} {GIB} 0 0 0")
    driver.start()
    driver.until(lambda r: r["devices"])
    driver.says("lost")
    lost = driver.until(lambda r: r["problem"])
    assert lost["problem"].startswith("NVMLError_GpuIsLost")
    older = driver.until(lambda r: r["age_s"] > lost["age_s"] + 0.2)
    assert older["devices"] == lost["devices"] != []
    driver.says(f"1  {GIB} 0 0 0 0")
    back = driver.until(lambda r: not r["problem"])
    assert back["age_s"] < 60
    assert back["devices"][0]["used_bytes"] == GIB
