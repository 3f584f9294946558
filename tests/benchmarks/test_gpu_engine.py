"""Benchmarks in processes of their own: what these print is seen at once, and nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import gpu_engine, gpu_variants
from workers.variant_config import VariantConfig

FAILS = """
print('{"first": 1}')
print("some words")
raise SystemExit(3)
"""
HANGS = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print('{"worker": %d}' % worker.pid, flush=True)
time.sleep(3600)
"""
STARTS = """
from benchmarks import gpu_engine
gpu_engine.in_own_process("talker")
"""


TELLS = """
import json, os
print(json.dumps({"gpus": os.environ["CUDA_VISIBLE_DEVICES"]}))
"""
STARTS_TWO = """
from functools import partial
from benchmarks import gpu_engine
list(gpu_engine.side_by_side([partial(gpu_engine.in_own_process, "talker")] * 3, 2))
"""


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A module of that name, that can be run."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")

    def write(source: str) -> None:
        (tmp_path / "talker.py").write_text(source)

    return write


def wait_for_the_end_of(pid: int) -> None:
    """A killed process may still exist, or may no longer be a child of any process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


def test_a_failed_process_s_results_are_kept_and_its_output_shown(
    talker: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    talker(FAILS)
    assert gpu_engine.in_own_process("talker") == [{"first": 1}]
    first, how, *words = capsys.readouterr().out.splitlines()
    assert first == '{"first": 1}'
    assert how.endswith("-m talker ended with 3:")
    assert words == ["some words"]


def test_a_process_that_hangs_is_ended_with_its_workers(
    talker: Callable[[str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is late as soon as it has printed."""
    talker(HANGS)
    late_s = 10**9
    printed = capsys.readouterr
    seen: list[str] = []

    def now_s() -> float:
        seen.append(printed().out)
        return time.monotonic() + (late_s if "worker" in "".join(seen) else 0)

    clock = SimpleNamespace(monotonic=now_s)
    monkeypatch.setattr(gpu_engine, "time", clock)
    (found,) = gpu_engine.in_own_process("talker", timeout_s=late_s)
    wait_for_the_end_of(found["worker"])
    assert "not done after 1000000000 s" in printed().out


def test_the_process_ends_with_its_parent(talker: Callable[[str], None]) -> None:
    talker(HANGS)
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        worker = int(starter.stdout.readline().split()[1].strip("}\n"))
        os.kill(starter.pid, signal.SIGTERM)
        assert starter.wait() == 128 + signal.SIGTERM
    wait_for_the_end_of(worker)


def test_cases_side_by_side_see_their_own_gpus(talker: Callable[[str], None]) -> None:
    talker(TELLS)
    cases = ["graphs cached", "pp2 graphs cached", "eager cached", "tp2 eager cached", "eager uncached"]
    works = [
        partial(gpu_engine.in_own_process, "talker", variables=seen)
        for _, seen in gpu_variants.on_gpus(cases, ["0", "1"])
    ]
    found = [row["gpus"] for rows in gpu_engine.side_by_side(works, 2) for row in rows]
    assert sorted(found) == ["0", "0", "0,1", "0,1", "1"]


def test_the_processes_end_with_their_parent(talker: Callable[[str], None]) -> None:
    talker(HANGS)
    with subprocess.Popen([sys.executable, "-c", STARTS_TWO], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        workers = [int(starter.stdout.readline().split()[1].strip("}\n")) for _ in range(2)]
        os.kill(starter.pid, signal.SIGTERM)
        assert starter.wait() == 128 + signal.SIGTERM
    for worker in workers:
        wait_for_the_end_of(worker)


def test_a_gpu_that_is_too_small_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 81559\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpu_engine.need_memory(80 * 10**9, "fewer --variants")
    with pytest.raises(SystemExit, match="104 GB are needed, and this GPU has 86: fewer --variants"):
        gpu_engine.need_memory(104 * 10**9, "fewer --variants")


def test_no_call_is_refused_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu_engine.need_memory(10**15, "fewer --variants")


def test_no_engine_starts_without_our_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "entry_points", lambda **asked: ())
    with pytest.raises(SystemExit, match="vLLM would not find our plug-in"):
        gpu_engine.make_engine(Path("base"), VariantConfig(1, 1 << 20, 1 << 20, 8))
