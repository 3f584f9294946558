"""The layout of weights in the arena, for all operations."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 128  # bytes; a Triton load of 16 bytes per thread needs at least 16


@dataclass(frozen=True)
class Part:
    """One array of a slot's weights in one layer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def total_bytes(parts: Sequence[Part]) -> int:
    """The bytes of the parts in the arena, each part aligned."""
    return sum(aligned(part.size_bytes) for part in parts)


def offsets(parts: Sequence[Part], start: int) -> dict[str, int]:
    """The byte where each part begins if the first begins at byte `start`, a multiple of ALIGNMENT."""
    starts, at = {}, start
    for part in parts:
        starts[part.name] = at
        at += aligned(part.size_bytes)
    return starts


def view(memory: torch.Tensor, part: Part, offset: int) -> torch.Tensor:
    """The part at byte `offset` of `memory` (uint8 [bytes]), as a tensor that shares its memory."""
    flat = memory[offset : offset + part.size_bytes]
    return flat.view(part.dtype).view(part.shape)


def view_anywhere(memory: torch.Tensor, part: Part, offset: int) -> torch.Tensor:
    """The same as `view`, also for memory before or behind `memory`, on the CPU, as kernels on a GPU see it.

    The caller must know that the memory exists.
    """
    raw = (ctypes.c_uint8 * part.size_bytes).from_address(memory.data_ptr() + offset)
    return torch.frombuffer(raw, dtype=part.dtype).view(part.shape)


def views(memory: torch.Tensor, parts: Sequence[Part], start: int) -> Mapping[str, torch.Tensor]:
    at = offsets(parts, start)
    return {part.name: view(memory, part, at[part.name]) for part in parts}
