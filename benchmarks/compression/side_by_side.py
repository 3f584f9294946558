"""Several processes at a time on a host's GPUs, until all have run or the time is over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

POLL_S = 0.2


@dataclass(frozen=True)
class Process:
    """`python` with these arguments; what it says goes to `log`."""

    name: str
    arguments: Sequence[str]
    log: Path


@dataclass(frozen=True)
class _Running:
    task: Process
    process: subprocess.Popen[bytes]
    slot: int


def carry_out(tasks: Sequence[Process], parallel: int, limit_s: float, device: str) -> list[str]:
    """Start tasks in their order, `parallel` of them at a time for each GPU; end those that run at the limit.

    Says how each ended, and returns the names of those that failed or were ended.
    """
    count = gpus(device)
    free, end = list(range(parallel * count)), time.monotonic() + limit_s
    waiting, running, bad = list(tasks), list[_Running](), list[str]()
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and free:
                slot = free.pop(0)
                running.append(_start(waiting.pop(0), slot, _environment(slot, count, parallel * count)))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                free.append(each.slot)
                bad += _ended(each)
            time.sleep(POLL_S)
    finally:
        for each in running:
            each.process.kill()
            each.process.wait()
    return [*bad, *(each.task.name for each in running), *(task.name for task in waiting)]


def gpus(device: str) -> int:
    """The number of devices; 1 for a CPU."""
    return max(1, torch.cuda.device_count()) if device == "cuda" else 1


def _environment(slot: int, gpus: int, slots: int) -> dict[str, str]:
    """A process has one GPU, and its share of the cores."""
    threads = max(1, (os.cpu_count() or 1) // slots)
    own = {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **own} | ({"CUDA_VISIBLE_DEVICES": str(slot % gpus)} if gpus > 1 else {})


def _start(task: Process, slot: int, environment: Mapping[str, str]) -> _Running:
    with task.log.open("wb") as log:
        command = [sys.executable, *task.arguments]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    return _Running(task, process, slot)


def _ended(each: _Running) -> list[str]:
    code = each.process.returncode
    lines = each.task.log.read_text(errors="replace").strip().splitlines()
    print(f"{each.task.name}: {'done' if code == 0 else f'ended with {code}: {lines[-1:]}'}", flush=True)
    return [] if code == 0 else [each.task.name]
