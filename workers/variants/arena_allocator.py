"""Which bytes of an arena are taken, and which extents must move so that free bytes become contiguous. Pure.

Extents move only towards the arena's first byte. So free bytes work like one gap: any size up to their sum
fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Move:
    """The move of an owner's extent from byte `source` to byte `target`, which is before it; they may
    overlap.
    """

    owner: int
    source: int
    target: int
    size: int


@dataclass(frozen=True)
class _Extent:
    start: int
    size: int
    owner: int

    @property
    def end(self) -> int:
        return self.start + self.size


class ArenaAllocator:
    """Non-overlapping extents [start, start + size) in `capacity` bytes, one per owner (a slot)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: dict[int, tuple[int, int]] = {}

    def take(self, owner: int, size: int) -> int | None:
        """Take `size` bytes for the owner from the smallest gap that has them; between equal gaps, the first.

        Returns the start, or None if there is no such gap.
        """
        if owner in self._taken:
            raise ValueError(f"owner {owner} holds an extent already; release that extent first")
        if size == 0:  # an empty extent must not split a gap
            self._taken[owner] = (0, 0)
            return 0
        fitting = [(length, start) for start, length in self._gaps() if length >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        self._taken[owner] = (start, size)
        return start

    def moves_for(self, size: int) -> tuple[Move, ...] | None:
        """The moves, in their order, after which there is a gap of `size` bytes, moving the fewest bytes.

        The moved extents are neighbours. None if all gaps together are smaller.
        """
        extents, gaps = self._extents(), [length for _, length in self._gaps()]
        best: tuple[int, int, int] | None = None
        for first in range(len(gaps)):
            for last, found in enumerate(accumulate(gaps[first:]), first):
                if found >= size:
                    moved = sum(extent.size for extent in extents[first:last])
                    best = min(best or (moved, first, last), (moved, first, last))
                    break
        if best is None:
            return None
        _, first, last = best
        widths = accumulate(gaps[first:last])
        return tuple(
            Move(extent.owner, extent.start, extent.start - width, extent.size)
            for extent, width in zip(extents[first:last], widths, strict=True)
            if width
        )

    def moved(self, move: Move) -> None:
        """Record that the owner's extent now lies at the move's target."""
        self._taken[move.owner] = (move.target, move.size)

    def give_back(self, owner: int) -> None:
        """Free the owner's extent; does nothing if the owner has none."""
        self._taken.pop(owner, None)

    @property
    def taken_bytes(self) -> int:
        return sum(size for _, size in self._taken.values())

    def size_of(self, owner: int) -> int:
        return self._taken.get(owner, (0, 0))[1]

    def _extents(self) -> list[_Extent]:
        """The extents that are not empty, by their starts."""
        held = self._taken.items()
        return sorted(
            (_Extent(start, size, owner) for owner, (start, size) in held if size),
            key=lambda extent: extent.start,
        )

    def _gaps(self) -> list[tuple[int, int]]:
        """(start, size) of the gap before each extent, and after the last; a gap may have 0 bytes."""
        extents = self._extents()
        starts = [0, *(extent.end for extent in extents)]
        ends = [*(extent.start for extent in extents), self.capacity]
        return [(start, end - start) for start, end in zip(starts, ends, strict=True)]
