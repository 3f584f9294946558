"""A variant in host memory: packed as it will lie on the device, so that placing it is one copy."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from workers.kernels.types import Part, offsets, views
from workers.variants.pieces import Contents, Piece, Row
from workers.variants.shapes import LayerShape

log = logging.getLogger(__name__)

TableKey = tuple[str, str]  # (layer, operation)


@dataclass(frozen=True)
class Entry:
    """One table row to be: its parts begin `start` bytes into the variant's memory."""

    key: TableKey
    parts: tuple[Part, ...]
    start: int
    row: Row

    def row_at(self, base: int) -> tuple[int, ...]:
        """The row, for a variant that lies at byte `base` of the arena."""
        return self.row(offsets(self.parts, base + self.start))


@dataclass(frozen=True)
class HostVariant:
    """`memory` is uint8 [bytes], page-locked where there is a GPU."""

    memory: torch.Tensor
    entries: tuple[Entry, ...]

    @property
    def size_bytes(self) -> int:
        return self.memory.numel()

    @property
    def operations(self) -> frozenset[str]:
        return frozenset(entry.key[1] for entry in self.entries)


def pack(contents: Contents, layers: Iterable[LayerShape], dtype: torch.dtype, pinned: bool) -> HostVariant:
    """Read, cut, repack: everything a rank needs of one variant. Blocking, seconds for a large delta.

    Raises ValueError when the files do not fit the layers.
    """
    pieces = [piece for layer in layers for piece in contents.pieces(layer, dtype)]
    starts = _starts(pieces)
    memory = _page_locked(starts.pop()) if pinned else torch.empty(starts.pop(), dtype=torch.uint8)
    filled: set[str] = set()
    for piece, start in zip(pieces, starts, strict=True):
        if piece.source not in filled:
            piece.fill(views(memory, piece.parts, start))
            filled.update([piece.source] if piece.source else ())
    entries = (
        Entry((piece.layer, piece.op), piece.parts, start, piece.row)
        for piece, start in zip(pieces, starts, strict=True)
    )
    return HostVariant(memory, tuple(entries))


def _page_locked(size: int) -> torch.Tensor:
    """uint8 [size]. torch's own page-locked memory comes in powers of two: 4 GiB for a delta of 2.9."""
    memory = torch.empty(size, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    if size and int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) != 0:
        log.warning("%d bytes could not be page-locked as they are; torch's allocator takes more", size)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if size:
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def _starts(pieces: Iterable[Piece]) -> list[int]:
    """Where each piece begins, and last of all how many bytes they take together."""
    starts, at = [], 0
    shared: dict[str, int] = {}
    for piece in pieces:
        if piece.source in shared:
            starts.append(shared[piece.source])
            continue
        if piece.source:
            shared[piece.source] = at
        starts.append(at)
        at += piece.size_bytes
    return [*starts, at]
