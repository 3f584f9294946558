"""Copies of a variant to the device that steps need not wait for: each layer waits there for its own part.

All of them are given to the device before any step may use the variant. So nothing that happens on the host
afterwards can keep a step waiting: either the device carries them out, or it has failed as a whole, and with
it the steps.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

log = logging.getLogger(__name__)

# Small enough that the first layer need not wait long, and a step's own small copies go between two; it
# divides `pages.CHUNK_BYTES`, as no copy may cross from what was page-locked at one time to what was at
# another.
PIECE_BYTES = 8 << 20


# Int64 `value` is to be written to address `at` when the first `end` bytes of the variant are there.
ARRIVAL = np.dtype([("end", np.int64), ("at", np.uint64), ("value", np.int64)])
Arrivals = npt.NDArray[np.void]


class Line(Protocol):
    """Carries out what it is given, one after the other, some time later. Addresses are bytes."""

    def copy(self, into: int, source: int, size: int) -> None:
        """From host memory to the device's."""

    def write(self, arrivals: Arrivals) -> None:
        """Their values to the device's memory, to be seen there only after all that was copied before."""


def send(line: Line, memory: torch.Tensor, into: int, arrivals: Arrivals) -> None:
    """All of `memory`, uint8 [bytes] on the host, to address `into`; each arrival, in the order of their
    ends, as soon as it is true."""
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


# What the driver is told of a write (CUstreamBatchMemOpParams), at most so many at once.
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
    """A stream of CUDA. To be used where its device is the current one.

    The driver is called directly, and Python's lock is kept meanwhile: a call takes some microseconds, there
    are dozens of them, and a request waits for all.
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
    return RuntimeError(f"the GPU's driver refuses a variant's copy: CUDA error {error}")


def line_of(stream: torch.cuda.Stream) -> Line | None:
    """None where the driver cannot be called so: variants are then there before a step may use them."""
    try:
        return CudaLine(stream)
    except (OSError, AttributeError):
        log.warning("variants are copied as a whole before they run: this driver has no writes in a stream")
        return None
