"""Copies of a variant to the device that steps need not wait for: each layer waits there for its own part.

All of them are given to the device before any step may use the variant. So nothing that happens on the host
afterwards can keep a step waiting: either the device carries them out, or it has failed as a whole, and with
it the steps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

log = logging.getLogger(__name__)

# Small enough that the first layer need not wait long, and a step's own small copies go between two; it divides
# `pages.CHUNK_BYTES`, as no copy may cross from what was page-locked at one time to what was at another.
PIECE_BYTES = 8 << 20


class Line(Protocol):
    """Carries out what it is given, one after the other, some time later. Addresses are bytes."""

    def copy(self, into: int, source: int, size: int) -> None:
        """From host memory to the device's."""

    def write(self, at: int, value: int) -> None:
        """An int64 to the device's memory, to be seen there only after all that was copied before."""


class Arrival(NamedTuple):
    """`value` is to be written to address `at` when the first `end` bytes of the variant are there."""

    end: int
    at: int
    value: int


def send(line: Line, memory: torch.Tensor, into: int, arrivals: Iterable[Arrival]) -> None:
    """All of `memory`, uint8 [bytes] on the host, to address `into`; each arrival as soon as it is true."""
    due = deque(sorted(arrivals))
    source, size = memory.data_ptr(), memory.numel()
    for begin in range(0, size, PIECE_BYTES):
        end = min(begin + PIECE_BYTES, size)
        line.copy(into + begin, source + begin, end - begin)
        while due and due[0].end <= end:
            arrival = due.popleft()
            line.write(arrival.at, arrival.value)
    if due:
        raise ValueError(f"a variant of {size} bytes cannot have {due[-1].end} of them on the device")


class CudaLine:
    """A stream of CUDA. To be used where its device is the current one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._stream = stream.cuda_stream

    def copy(self, into: int, source: int, size: int) -> None:
        self._check(self._driver.cuMemcpyHtoDAsync(into, source, size, self._stream))

    def write(self, at: int, value: int) -> None:
        self._check(self._driver.cuStreamWriteValue64(self._stream, at, value, 0))

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]) != 0:
            raise RuntimeError(f"a variant's copy to the GPU was refused: {result[0]!r}")


def line_of(stream: torch.cuda.Stream) -> Line | None:
    """None where the driver cannot be called: variants are then there before a step may use them."""
    try:
        return CudaLine(stream)
    except ImportError:
        log.warning("cuda.bindings is not installed: variants are copied as a whole before they run")
        return None
