"""Memory of whole pages, which the GPU's driver can lock, and which goes back to the system without Python's
lock: gigabytes of it take tens of milliseconds, in which an engine would stand still."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import time
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)

# Locked and copied at a time. While the driver locks or unlocks it starts no kernel, and a copy to the GPU
# waits for those before it: all of a delta at once would hold up a step for 60 ms, a chunk does for 1 to 3.
# A copy must not cross from what was locked at one time to what was locked at another.
CHUNK_BYTES = 64 << 20
# Between two of them. Without it a thread that waits to start a kernel is passed over.
PAUSE_S = 0.0002
_READS_AT_HOST_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def whole_pages(size: int) -> npt.NDArray[np.uint8]:
    """uint8 [size] in pages of its own, of zeros; large ones where the system has them."""
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:size]


def chunks(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """All of `memory`, in the parts that are locked and copied at a time."""
    return (memory[begin:end] for begin, end in spans(0, memory.numel()))


def spans(start: int, size: int) -> Iterator[tuple[int, int]]:
    """Bytes [start, start + size) of such memory, cut where chunks end: (begin, end) of each part."""
    end = start + size
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield start, stop
        start = stop


def page_locked(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes, page-locked. Their pages are there already: what the driver does to them is short,
    and torch's own page-locked memory comes in powers of two: 4 GiB for a delta of 2.9."""
    locked: list[int] = []
    for chunk in chunks(memory):
        if int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.numel(), 0)) != 0:
            log.warning(
                "%d bytes could not be page-locked as they are; torch's allocator takes more", memory.numel()
            )
            _unlock(locked)
            return memory.pin_memory()
        locked.append(chunk.data_ptr())
        time.sleep(PAUSE_S)
    weakref.finalize(memory, _unlock, locked).atexit = False  # the process's end unlocks them all
    return memory


@functools.cache
def reads_locked_memory(device: torch.device) -> bool:
    """Whether the device's kernels read such memory at the address that it has here."""
    told, error = ctypes.c_int(0), 1
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuDeviceGetAttribute(ctypes.byref(told), _READS_AT_HOST_ADDRESS, device.index or 0)
    if error or not told.value:
        log.warning("%s reads no host memory in place: embeddings of deltas take its own, unplanned", device)
    return not error and bool(told.value)


def _unlock(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
        time.sleep(PAUSE_S)
