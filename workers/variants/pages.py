"""Memory of whole pages, which the GPU's driver can lock, and which is freed without the GIL.

Freeing gigabytes takes tens of milliseconds, during which an engine would otherwise stand still.
"""

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

# Bytes that are locked and copied at a time. While the driver locks or unlocks it starts no kernel, and a
# copy to the GPU waits for earlier copies. A whole delta at once would delay a step by 60 ms, a chunk delays
# it by 1 to 3. A copy must not cross the boundary between two locked chunks.
CHUNK_BYTES = 64 << 20
# The pause between two chunks. Without it a thread that waits to start a kernel would not get its turn.
PAUSE_S = 0.0002
_READS_AT_HOST_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


def whole_pages(size: int) -> npt.NDArray[np.uint8]:
    """uint8 [size] of zeros in its own pages; huge pages if the system has them."""
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:size]


def chunks(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """All of `memory`, in the parts that are locked and copied at a time."""
    return (memory[begin:end] for begin, end in spans(0, memory.numel()))


def spans(start: int, size: int) -> Iterator[tuple[int, int]]:
    """Bytes [start, start + size) of such memory, split at the ends of chunks: (begin, end) of each part."""
    end = start + size
    while start < end:
        stop = min(end, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield start, stop
        start = stop


def page_locked(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes, page-locked.

    The pages exist already, so the driver's work is short. torch's own page-locked memory comes in powers of
    two: 4 GiB for a delta of 2.9.
    """
    locked: list[int] = []
    for chunk in chunks(memory):
        if int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.numel(), 0)) != 0:
            log.warning(
                "%d bytes could not be page-locked in place; torch's allocator takes more memory",
                memory.numel(),
            )
            _unlock(locked)
            return memory.pin_memory()
        locked.append(chunk.data_ptr())
        time.sleep(PAUSE_S)
    weakref.finalize(memory, _unlock, locked).atexit = False  # the process's end unlocks them all
    return memory


@functools.cache
def reads_locked_memory(device: torch.device) -> bool:
    """Whether the device's kernels read page-locked memory at its host address."""
    told, error = ctypes.c_int(0), 1
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuDeviceGetAttribute(ctypes.byref(told), _READS_AT_HOST_ADDRESS, device.index or 0)
    if error or not told.value:
        log.warning(
            "%s cannot read host memory directly: embeddings of deltas take unplanned device memory", device
        )
    return not error and bool(told.value)


def _unlock(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
        time.sleep(PAUSE_S)
