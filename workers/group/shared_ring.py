"""Data from one process to others of the same machine, in memory that all of them have mapped.

The sender writes into one of a few places, which it takes in turn, and counts what it has written. Receivers
wait for that count, copy, and count what they have read, which the sender waits for before it takes a place
again. Where counts and copies are a GPU's work, nobody's CPU waits. Counts go round at 2^32.
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

LINE = 128  # bytes between counts: no two processes write into one line of memory
FOLDER = Path("/dev/shm")
WRAP = 1 << 32


@dataclass(frozen=True)
class Layout:
    """Of the memory: how many processes have it, its places, and bytes of each."""

    processes: int
    places: int
    place_bytes: int

    WRITTEN = 0  # where the sender's count is

    def read(self, process: int) -> int:
        """Where a receiver's count is."""
        return LINE * (1 + process)

    def place(self, number: int) -> int:
        """Where the message of that number begins; the first has 1."""
        return LINE * (1 + self.processes) + (number - 1) % self.places * self.place_bytes

    @property
    def size_bytes(self) -> int:
        return LINE * (1 + self.processes) + self.places * self.place_bytes


class Counts(Protocol):
    """Counts in the memory, 4 bytes each at `at`, in the order of whatever carries out the copies."""

    def wait(self, at: int, number: int) -> None:
        """What follows comes after the count has reached `number`."""
        ...

    def write(self, at: int, number: int) -> None:
        """After all that came before, also for others."""
        ...


class Ring:
    """One process's end. `sender` is which of the processes sends. Not for use by threads."""

    def __init__(
        self, process: int, sender: int, layout: Layout, memory: torch.Tensor, counts: Counts
    ) -> None:
        """`memory`: uint8 [layout.size_bytes], of zeros when the first process begins."""
        self._process, self._sender, self._layout = process, sender, layout
        self._memory, self._counts = memory, counts
        self._number = 0

    def pass_on(self, tensor: torch.Tensor) -> None:
        """Send it, or receive into it: the same call on all, with contiguous tensors of one size.

        Errors: ValueError for one that no place has room for, on all of them.
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
    """Memory of zeros, which others can map by the returned name until it is unlinked. Raises OSError."""
    name = f"ostinato-{secrets.token_hex(16)}"
    file = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(file, 0, size)  # or a write would find later that there is no memory left
    except OSError:
        unlink(name)
        raise
    finally:
        os.close(file)
    return name


def mapped(name: str, size: int) -> torch.Tensor:
    """uint8 [size]. Raises OSError, also where the name is another machine's."""
    file = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file, size), np.uint8))
    finally:
        os.close(file)


def unlink(name: str) -> None:
    """Who has mapped it keeps it."""
    (FOLDER / name).unlink(missing_ok=True)
