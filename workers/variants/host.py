"""A variant in host memory: packed in its layout on the device, so that placing it is a plain copy.

Its embedding stays on the host. A step reads a few rows of it, which the device fetches itself. So a quarter
of a gigabyte of a 7B's delta is not copied and takes no device memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
    """A table row before placement.

    Its parts begin `start` bytes into the variant's memory that is copied to the device, or, with `stays`,
    into the memory that stays.
    """

    key: TableKey
    parts: tuple[Part, ...]
    start: int
    row: Row
    stays: bool = False

    def row_at(self, base: int) -> tuple[int, ...]:
        """The row, for a memory that begins at byte `base` of the arena; memory that stays lies far outside
        of it.
        """
        return self.row(offsets(self.parts, base + self.start))

    @property
    def end(self) -> int:
        """The byte of the variant's memory that follows the parts."""
        return self.start + total_bytes(self.parts)


@dataclass(frozen=True, eq=False)
class HostVariant:
    """A packed variant: uint8 [bytes], page-locked if there is a GPU.

    `memory` is copied to the device; the device reads `staying` on the host.
    """

    memory: torch.Tensor
    entries: tuple[Entry, ...]
    staying: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    @property
    def size_bytes(self) -> int:
        return self.device_bytes + self.staying.numel()

    @property
    def device_bytes(self) -> int:
        return self.memory.numel()

    @property
    def operations(self) -> frozenset[str]:
        return frozenset(entry.key[1] for entry in self.entries)


@dataclass(frozen=True)
class Room:
    """The room on a device: at most `max_bytes`. If it cannot read host memory in place, everything is
    copied.
    """

    max_bytes: int | None = None
    reads_host: bool = True


ANY_ROOM = Room()


def pack(
    contents: Contents,
    layers: Iterable[LayerShape],
    dtype: torch.dtype,
    pinned: bool,
    threads: LoaderThreads | None = None,
    room: Room = ANY_ROOM,
    buffers: Buffers | None = None,
) -> HostVariant:
    """Read, verify, cut and pack the weights of one variant for a rank. Blocking; seconds for a large delta.

    Work is done file by file, or in stretches of a file, in `threads` if given; memory holds about one per
    thread. Raises ValueError if a file is invalid or does not fit the layers, and before reading if there is
    no `room`. `buffers` may be those of an earlier variant.
    """
    all_weights = [weights for layer in layers for weights in contents.layer_weights(layer, dtype)]
    places, size, staying_bytes = _places(all_weights, room.reads_host)
    if room.max_bytes is not None and size > room.max_bytes:
        raise ValueError(
            f"the variant needs {size} bytes on this rank, but only {room.max_bytes} are reserved for all "
            f"variants; {REMEDY}"
        )
    memory, staying = (torch.from_numpy(whole_pages(each)) for each in (size, staying_bytes))
    placed = list(zip(all_weights, places, strict=True))
    buffers = buffers or Buffers()
    filled: list[Placed] = [
        (weights, (staying if place.stays else memory)[place.start :][: weights.size_bytes])
        for weights, place in placed
        if not weights.copies
    ]
    jobs = copies.jobs(list(_copied(placed)), memory, buffers, threads.count if threads else 1)
    jobs += filling.jobs(filled, buffers)
    try:
        (threads.run if threads else run_here)(jobs)
    finally:
        buffers.trim(threads.count if threads else 1)
    entries = tuple(
        Entry((weights.layer, weights.op), weights.parts, place.start, weights.row, place.stays)
        for weights, place in placed
    )
    if pinned:
        memory, staying = page_locked(memory), page_locked(staying)
    return HostVariant(memory, entries, staying)


@dataclass(frozen=True)
class _Place:
    """The byte at which weights begin, within the copied memory or within the memory that `stays`."""

    start: int
    stays: bool


def _copied(placed: Iterable[tuple[LayerWeights, _Place]]) -> Iterator[copies.PlacedCopy]:
    for weights, place in placed:
        if weights.copies:
            at = offsets(weights.parts, place.start)
            yield from ((copy, at[copy.part.name]) for copy in weights.copies)


def _places(all_weights: Sequence[LayerWeights], stays: bool) -> tuple[list[_Place], int, int]:
    """The place of each layer's weights, and the number of bytes that are copied and that stay.

    Weights that share memory with weights that steps read whole are copied.
    """
    read_whole = {weights.source for weights in all_weights if not weights.few_read} - {""}
    taken = {False: 0, True: 0}
    shared: dict[str, _Place] = {}
    places = []
    for weights in all_weights:
        if (place := shared.get(weights.source)) is None:
            here = stays and weights.few_read and not weights.copies and weights.source not in read_whole
            place = _Place(taken[here], here)
            taken[here] += weights.size_bytes
            if weights.source:
                shared[weights.source] = place
        places.append(place)
    return places, taken[False], taken[True]
