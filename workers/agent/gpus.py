"""GPUs, asked of NVML, which needs no CUDA context. Without a driver there are none."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pynvml

from workers.agent.sampling import GpuReading


class Nvml:
    """A session with the driver. Errors of every method: pynvml.NVMLError; then open a new one.

    `only` some GPUs are read, None: all. Errors: ValueError for one that is not there.
    """

    def __init__(self, only: Iterable[int] | None = None) -> None:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        ours = range(count) if only is None else sorted(set(only))
        if strange := [index for index in ours if index >= count]:
            raise ValueError(f"there is no GPU {strange[0]}, only {count}; correct the setting `gpus`")
        self._handles = {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in ours}
        self._names = {i: _text(pynvml.nvmlDeviceGetName(h)) for i, h in self._handles.items()}
        self.linked = [pair for pair in combinations(self._handles, 2) if self._are_linked(*pair)]

    def read(self) -> list[GpuReading]:
        return [self._read(index) for index in self._handles]

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def _read(self, index: int) -> GpuReading:
        handle = self._handles[index]
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuReading(
            index,
            self._names[index],
            int(memory.total),
            int(memory.total) - int(memory.free),  # what the driver keeps for itself is not free either
            int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            tuple((p.pid, p.usedGpuMemory) for p in _processes(handle)),
        )

    def _are_linked(self, a: int, b: int) -> bool:
        status = pynvml.nvmlDeviceGetP2PStatus(
            self._handles[a], self._handles[b], pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
        return bool(status == pynvml.NVML_P2P_STATUS_OK)


def gpu_count() -> int:
    """GPUs of this host; 0 without a driver, or without its library. Errors: pynvml.NVMLError."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _processes(handle: Any) -> list[Any]:
    return [
        *pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
        *pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
    ]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
