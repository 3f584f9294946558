"""The rates of a node's devices, measured on the node. A CPU host is one device: its cores and memory."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

import numpy as np

from profiler.types import CPU
from workers.agent.gpus import VISIBLE, Nvml, gpu_count
from workers.agent.sampling import GpuReading, gpu_kind
from workers.messages import DeviceReport, NodeReport
from workers.vllm_environment import vllm_version

_COPY_BYTES = 128 << 20
_MATRIX = 1024


def probe(node: str, gpus: Collection[int] | None = None) -> NodeReport:
    """Measure the GPUs of these indices (None: all), or the CPU if there are none. About 1 s per kind."""
    return NodeReport(node, _gpus(gpus) or (_cpu(),), vllm_version())


def _cpu() -> DeviceReport:
    return DeviceReport(0, CPU, _cpu_bandwidth(), _cpu_flops(), cpu_model())


def cpu_model() -> str:
    """The CPU's name, and its number of usable cores: the speed depends on both."""
    text = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = named.group(1) if named else platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{' '.join(name.split())} x{cores}"


def _cpu_bandwidth() -> float:
    """Bytes read per second, in one pass over memory larger than the caches (decoding reads weights)."""
    data = np.ones(_COPY_BYTES // 4, dtype=np.float32)
    return _best_rate(data.sum, _COPY_BYTES)


def _cpu_flops() -> float:
    a = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
    return _best_rate(lambda: a @ a, 2 * _MATRIX**3)


def _best_rate(work: Callable[[], object], amount: float, repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return amount / min(seconds)


def _gpus(only: Collection[int] | None) -> tuple[DeviceReport, ...]:
    """Reports of all GPUs; of each kind only the GPU with the most free memory is measured."""
    if not gpu_count():
        return ()
    with closing(Nvml(only)) as driver:
        readings = driver.read()
    freest = {r.name: r.index for r in sorted(readings, key=lambda r: -r.used_bytes)}
    # CUDA must number these GPUs in this order, whatever it was set to see: NVML ignores that setting.
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(map(str, freest.values()))}
    rates = {name: _gpu_rates(number) for number, name in enumerate(freest)}
    return tuple(_report(r, *rates[r.name]) for r in readings)


def _report(gpu: GpuReading, bandwidth: float, flops: float) -> DeviceReport:
    kind = gpu_kind(gpu.name)
    return DeviceReport(gpu.index, kind, bandwidth, flops, kind)


def _gpu_rates(number: int) -> tuple[float, float]:
    """The memory and compute rates of CUDA's device `number`."""
    import torch

    device = torch.device("cuda", number)
    data = torch.ones(_COPY_BYTES, dtype=torch.float32, device=device)
    a = torch.ones((8 * _MATRIX, 8 * _MATRIX), dtype=torch.bfloat16, device=device)

    def timed(work: Callable[[], object], amount: float) -> float:
        def run() -> None:
            work()
            torch.cuda.synchronize(device)

        run()
        return _best_rate(run, amount)

    # A clone reads and writes every one of its 4-byte elements.
    return timed(data.clone, 8 * _COPY_BYTES), timed(lambda: a @ a, 2 * (8 * _MATRIX) ** 3)
