"""Whole models as files: the baseline's that do not fit into host memory.

They are read as fast as this machine can: several threads, from the page cache, into memory that is there.
A disk is slower, which favours the baseline.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import gpu_engine

ALIGNMENT = 256  # of a tensor within a model
READERS = 8
PIECE_BYTES = 64 << 20
POOL_NUMBERS = 8 << 20
SLACK_BYTES = 64 << 20  # an engine pads what a checkpoint has
SPREAD = 1e-3  # of weights, as vLLM's dummies have it


def path(folder: Path, number: int) -> Path:
    return folder / f"whole-{number}"


def write(folder: Path, shape: dict[str, int], number: int) -> Path:
    """A model's random weights in bfloat16, as they lie in memory."""
    sizes = [int(np.prod(dims)) for dims in gpu_engine.tensor_shapes(shape).values()]
    left = SLACK_BYTES + sum(-(-2 * size // ALIGNMENT) * ALIGNMENT for size in sizes)
    values = np.random.default_rng(number).standard_normal(POOL_NUMBERS, np.float32)
    pool = ((SPREAD * values).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    with path(folder, number).open("wb") as file:
        while left:
            left -= file.write(pool[:left].data)
    return path(folder, number)


def read_into(source: str | Path, memory: npt.NDArray[np.uint8]) -> None:
    """The file's first bytes, as many as the memory has."""
    file = os.open(source, os.O_RDONLY)

    def fill(start: int) -> None:
        piece = memory[start : start + PIECE_BYTES]
        done = 0
        while done < len(piece):
            count = os.preadv(file, [piece[done:].data], start + done)
            if not count:
                raise EOFError(f"{source} ends at byte {start + done}; expected {len(memory)} bytes.")
            done += count

    try:
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(fill, range(0, len(memory), PIECE_BYTES)))
    finally:
        os.close(file)


def measured_gb_per_s(source: Path) -> float:
    """The rate of a second reading into the same page-locked memory."""
    size = min(source.stat().st_size, 4 << 30)
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).numpy()
    read_into(source, memory)
    start_s = time.perf_counter()
    read_into(source, memory)
    return float(size / (time.perf_counter() - start_s) / 1e9)
