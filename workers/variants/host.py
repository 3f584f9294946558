"""A variant in host memory: packed as it will lie on the device, so that placing it is a plain copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from workers.kernels.types import Part, offsets, total_bytes
from workers.variant_config import REMEDY
from workers.variants import copies, filling
from workers.variants.filling import Placed
from workers.variants.layer_weights import Contents, LayerWeights, Row
from workers.variants.loader_threads import LoaderThreads, run_here
from workers.variants.pages import page_locked, whole_pages
from workers.variants.shapes import LayerShape
from workers.variants.tensors import Buffers

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

    @property
    def end(self) -> int:
        """The byte of the variant's memory that follows the parts."""
        return self.start + total_bytes(self.parts)


@dataclass(frozen=True, eq=False)
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


def pack(
    contents: Contents,
    layers: Iterable[LayerShape],
    dtype: torch.dtype,
    pinned: bool,
    threads: LoaderThreads | None = None,
    max_bytes: int | None = None,
    buffers: Buffers | None = None,
) -> HostVariant:
    """Read, verify, cut, repack: everything a rank needs of one variant. Blocking, seconds for a large delta.

    File by file, or in stretches of one, in `threads` where there are any: about as many are in memory.
    Raises ValueError when a file is not sound or does not fit the layers, and before anything is
    read when more than `max_bytes` are needed. `buffers` may be those of the variant before.
    """
    all_weights = [weights for layer in layers for weights in contents.layer_weights(layer, dtype)]
    starts = _starts(all_weights)
    size = starts.pop()
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"the variant needs {size} bytes on this rank, but only {max_bytes} are set aside for all "
            f"variants; {REMEDY}"
        )
    memory = torch.from_numpy(whole_pages(size))
    placed = list(zip(all_weights, starts, strict=True))
    buffers = buffers or Buffers()
    filled = [(weights, start) for weights, start in placed if not weights.copies]
    jobs = copies.jobs(list(_copied(placed)), memory, buffers, threads.count if threads else 1)
    jobs += filling.jobs(filled, memory, buffers)
    try:
        (threads.run if threads else run_here)(jobs)
    finally:
        buffers.trim(threads.count if threads else 1)
    entries = (
        Entry((weights.layer, weights.op), weights.parts, start, weights.row) for weights, start in placed
    )
    return HostVariant(page_locked(memory) if pinned else memory, tuple(entries))


def _copied(placed: Iterable[Placed]) -> Iterator[copies.PlacedCopy]:
    for weights, start in placed:
        if weights.copies:
            at = offsets(weights.parts, start)
            yield from ((copy, at[copy.part.name]) for copy in weights.copies)


def _starts(all_weights: Iterable[LayerWeights]) -> list[int]:
    """Where the weights of each layer begin, and last of all how many bytes they take together."""
    starts, at = [], 0
    shared: dict[str, int] = {}
    for weights in all_weights:
        if weights.source in shared:
            starts.append(shared[weights.source])
            continue
        if weights.source:
            shared[weights.source] = at
        starts.append(at)
        at += weights.size_bytes
    return [*starts, at]
