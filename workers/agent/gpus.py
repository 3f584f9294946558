"""GPUs, as NVML reports them. NVML needs no CUDA context. Without a driver there are no GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any, TypeVar

import pynvml

from workers.agent.sampling import GpuReading

T = TypeVar("T")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Nvml:
    """A session with the driver. All methods raise pynvml.NVMLError; then open a new session.

    It reads the GPUs of `only`; None: those that CUDA_VISIBLE_DEVICES leaves to this process. Raises
    ValueError for a missing GPU. A lost GPU is left out until it is back; if all are lost, that is an error.
    """

    def __init__(self, only: Iterable[int] | None = None) -> None:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        ours = sorted(set(_visible(count) if only is None else only))
        if strange := [index for index in ours if index >= count]:
            raise ValueError(
                f"GPU {strange[0]} does not exist, because this node has {count}; correct OSTINATO_GPUS"
            )
        self._ours = tuple(ours)
        self._handles: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self.linked: list[tuple[int, int]] = []

    def read(self) -> list[GpuReading]:
        readings: list[GpuReading] = []
        lost: pynvml.NVMLError | None = None
        for index in self._ours:
            try:
                readings.append(self._read(index))
            except pynvml.NVMLError_GpuIsLost as e:
                self._handles.pop(index, None)  # opened again once it is back
                lost = e
        if lost and not readings:
            raise lost
        return readings

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def _open(self, index: int) -> None:
        """Open a GPU. A lost GPU cannot be opened, and the others do not wait for it."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._names[index] = _text(pynvml.nvmlDeviceGetName(handle))
        self._handles[index] = handle
        self.linked = [pair for pair in combinations(sorted(self._handles), 2) if self._are_linked(*pair)]

    def _read(self, index: int) -> GpuReading:
        if index not in self._handles:
            self._open(index)
        handle = self._handles[index]
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuReading(
            index,
            self._names[index],
            int(memory.total),
            int(memory.total) - int(memory.free),  # memory that the driver reserves is not free either
            _answer(lambda: int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), 0),
            tuple((p.pid, p.usedGpuMemory) for p in _processes(handle)),
        )

    def _are_linked(self, a: int, b: int) -> bool:
        pair, what = (self._handles[a], self._handles[b]), pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        try:
            status = _answer(lambda: pynvml.nvmlDeviceGetP2PStatus(*pair, what), None)
        except pynvml.NVMLError_GpuIsLost:  # one of the two is lost; the other one still works
            return False
        return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _visible(count: int) -> Iterator[int]:
    """NVML's indices of the GPUs in CUDA_VISIBLE_DEVICES. As in CUDA, the list ends before the first missing
    GPU.

    Raises ValueError for a slice of a GPU.
    """
    if (listed := os.environ.get(VISIBLE)) is None:
        yield from range(count)
        return
    for name in map(str.strip, listed.split(",")):
        if name.startswith("MIG"):
            raise ValueError(f"{VISIBLE} names a slice of a GPU, {name!r}; list whole GPUs in OSTINATO_GPUS")
        found = int(name) if name.isdecimal() else _by_uuid(name, count)
        if found is None or found >= count:
            return
        yield found


def _by_uuid(beginning: str, count: int) -> int | None:
    """The only GPU whose UUID has this beginning; None if there is none or several."""
    uuids = (_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(count))
    found = [index for index, uuid in enumerate(uuids) if beginning and uuid.startswith(beginning)]
    return found[0] if len(found) == 1 else None


def gpu_count() -> int:
    """The number of GPUs of this host; 0 without a driver, or without its library. Errors:
    pynvml.NVMLError.
    """
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
        *_answer(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle), []),
        *_answer(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle), []),
    ]


def _answer(ask: Callable[[], T], otherwise: T) -> T:
    """The result of `ask`, or `otherwise` if a virtual GPU, a slice or an old driver does not support it."""
    try:
        return ask()
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_FunctionNotFound,
    ):
        return otherwise


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
