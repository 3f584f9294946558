"""Copies of a variant to the device that steps need not wait for: each layer waits there for its own part.

The device gets all copies before any step may use the variant. So no later event on the host can delay a
step. Either the device carries the copies out, or it has failed as a whole, and the steps with it.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)

# Small enough that the first layer does not wait long, and that a step's own small copies run between two. It
# divides `pages.CHUNK_BYTES`: a copy must not cross the boundary between two page-locked chunks.
PIECE_BYTES = 8 << 20


# The int64 `value` must be written to address `at` once the first `end` bytes of the variant have arrived.
ARRIVAL = np.dtype([("end", np.int64), ("at", np.uint64), ("value", np.int64)])
Arrivals = npt.NDArray[np.void]


class Line(Protocol):
    """Carries out copies and writes in order, asynchronously. Addresses are bytes."""

    def copy(self, into: int, source: int, size: int) -> None:
        """Copy host memory to the device's memory."""

    def write(self, arrivals: Arrivals) -> None:
        """Write the values to the device's memory; they become visible there only after all earlier
        copies.
        """


def send(line: Line, memory: torch.Tensor, into: int, arrivals: Arrivals) -> None:
    """Send all of `memory`, uint8 [bytes] on the host, to address `into`.

    Each arrival is written as soon as it holds, in the order of the arrivals' ends.
    """
    source, size, told = memory.data_ptr(), memory.numel(), 0
    for begin in range(0, size, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, size)
        line.copy(into + begin, source + begin, end - begin)
        true = int(np.searchsorted(arrivals["end"], end, side="right"))
        if true > told:
            line.write(arrivals[told:true])
        told = true
    if told < len(arrivals):
        last = arrivals["end"][-1]
        raise ValueError(f"a variant of {size} bytes cannot have {last} of them on the device")


# The driver's description of a write (CUstreamBatchMemOpParams), and the most writes per call.
_WRITE = np.dtype(
    [
        ("operation", np.uint32),
        ("", np.uint32),
        ("at", np.uint64),
        ("value", np.int64),
        ("flags", np.uint32),
        ("", np.uint32),
        ("alias", np.uint64),
        ("", np.uint64),
    ]
)
_WRITE_INT64 = 5
_MOST_WRITES = 128


class CudaLine:
    """A stream of CUDA. Its device must be the current device of the caller.

    The driver is called directly, without releasing the GIL. A call takes some microseconds, there are dozens
    of calls, and a request waits for all of them.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        driver = ctypes.PyDLL("libcuda.so.1")
        self._copy = driver.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64]
        self._write = driver.cuStreamBatchMemOp_v2
        self._write.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint]
        self._stream = stream.cuda_stream

    def copy(self, into: int, source: int, size: int) -> None:
        if error := self._copy(into, source, size, self._stream):
            raise _refused(error)

    def write(self, arrivals: Arrivals) -> None:
        told = np.zeros(len(arrivals), _WRITE)
        told["operation"], told["at"], told["value"] = _WRITE_INT64, arrivals["at"], arrivals["value"]
        for first in range(0, len(told), _MOST_WRITES):
            some = told[first : first + _MOST_WRITES]
            if error := self._write(self._stream, len(some), some.ctypes.data, 0):
                raise _refused(error)


def _refused(error: int) -> RuntimeError:
    return RuntimeError(f"the GPU's driver refused to copy a variant: CUDA error {error}")


def line_of(stream: torch.cuda.Stream) -> Line | None:
    """The line of a stream; None if the driver lacks these calls: variants then arrive before a step may use
    them.
    """
    try:
        return CudaLine(stream)
    except (OSError, AttributeError):
        log.warning(
            "variants are copied completely before they run, because this driver has no stream writes"
        )
        return None
