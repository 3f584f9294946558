"""Data from one process to others of the same machine, in memory that all of them have mapped.

The sender writes into one of a few places in turn, and counts its messages. Receivers wait for that count,
copy, and count the messages they have read. The sender waits for those counts before it reuses a place. If a
GPU does the counts and copies, no CPU waits. Counts wrap at 2^32.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

LINE = 128  # bytes between counts: no two processes write into one cache line
FOLDER = Path("/dev/shm")
WRAP = 1 << 32


@dataclass(frozen=True)
class Layout:
    """The layout of the memory: the number of processes, the number of places, and the bytes of each
    place.
    """

    processes: int
    places: int
    place_bytes: int

    WRITTEN = 0  # the place of the sender's count

    def read(self, process: int) -> int:
        """The place of a receiver's count."""
        return LINE * (1 + process)

    def place(self, number: int) -> int:
        """The start of message `number`; the first message has number 1."""
        return LINE * (1 + self.processes) + (number - 1) % self.places * self.place_bytes

    @property
    def size_bytes(self) -> int:
        return LINE * (1 + self.processes) + self.places * self.place_bytes


class Counts(Protocol):
    """Counts in the memory, 4 bytes each at `at`, in the order of the copies."""

    def wait(self, at: int, number: int) -> None:
        """Delay all later work until the count has reached `number`."""
        ...

    def write(self, at: int, number: int) -> None:
        """Write the count after all earlier work, as other processes see it, too."""
        ...


class Ring:
    """One process's end of the ring. `sender` is the number of the sending process. Not thread-safe."""

    def __init__(
        self, process: int, sender: int, layout: Layout, memory: torch.Tensor, counts: Counts
    ) -> None:
        """`memory`: uint8 [layout.size_bytes], zeros before the first process begins."""
        self._process, self._sender, self._layout = process, sender, layout
        self._memory, self._counts = memory, counts
        self._number = 0

    def pass_on(self, tensor: torch.Tensor) -> None:
        """Send the tensor, or receive into it: the same call in all processes, with contiguous tensors of one
        size.

        Errors: ValueError, in all processes, for a tensor that is larger than a place.
        """
        data = tensor.view(-1).view(torch.uint8)
        if data.numel() > self._layout.place_bytes:
            raise ValueError(f"expected at most {self._layout.place_bytes} bytes, got {data.numel()}")
        self._number += 1
        begin = self._layout.place(self._number)
        place = self._memory[begin : begin + data.numel()]
        if self._process == self._sender:
            self._wait_until_free()
            place.copy_(data, non_blocking=True)
            self._counts.write(self._layout.WRITTEN, self._number % WRAP)
        else:
            self._counts.wait(self._layout.WRITTEN, self._number % WRAP)
            data.copy_(place, non_blocking=True)
            self._counts.write(self._layout.read(self._process), self._number % WRAP)

    def _wait_until_free(self) -> None:
        before = self._number - self._layout.places
        for process in range(self._layout.processes):
            if before > 0 and process != self._sender:
                self._counts.wait(self._layout.read(process), before % WRAP)


def create(size: int) -> str:
    """Create memory of zeros, which others can map by the returned name until it is unlinked. Raises
    OSError.
    """
    name = f"ostinato-{secrets.token_hex(16)}"
    file = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # otherwise a write could later find that no memory is left
    except OSError:
        unlink(name)
        raise
    finally:
        os.close(file)
    return name


def mapped(name: str, size: int) -> torch.Tensor:
    """Map the memory: uint8 [size]. Raises OSError, also if the name is from another machine."""
    file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file, size), np.uint8))
    finally:
        os.close(file)


def unlink(name: str) -> None:
    """Remove the name; processes that have mapped the memory keep it."""
    (FOLDER / name).unlink(missing_ok=True)
