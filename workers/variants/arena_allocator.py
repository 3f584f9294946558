"""Which bytes of an arena are taken, and what must move so that free bytes lie together. Pure.

Extents move towards the arena's first byte only. So free bytes are as good as one gap: whatever is no larger
than all of them together has room.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Move:
    """An owner's extent, from byte `source` to byte `target`, which is before it; they may overlap."""

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
    """Non-overlapping [start, start + size) in `capacity` bytes, one per owner (a slot)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: dict[int, tuple[int, int]] = {}

    def take(self, owner: int, size: int) -> int | None:
        """The start of the smallest gap of at least `size` bytes, the first of equals, now the owner's; None
        when there is no such gap."""
        if owner in self._taken:
            raise ValueError(f"owner {owner} holds an extent already; give it back first")
        if size == 0:  # an extent of nothing must not part a gap in two
            self._taken[owner] = (0, 0)
            return 0
        fitting = [(length, start) for start, length in self._gaps() if length >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        self._taken[owner] = (start, size)
        return start

    def moves_for(self, size: int) -> tuple[Move, ...] | None:
        """The moves, in their order, after which there is a gap of `size` bytes: those of the fewest bytes,
        of extents that lie side by side. None when all gaps together are smaller."""
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
        """The owner's extent lies at the move's target now."""
        self._taken[move.owner] = (move.target, move.size)

    def give_back(self, owner: int) -> None:
        """Giving back what one does not hold does nothing."""
        self._taken.pop(owner, None)

    @property
    def taken_bytes(self) -> int:
        return sum(size for _, size in self._taken.values())

    def size_of(self, owner: int) -> int:
        return self._taken.get(owner, (0, 0))[1]

    def _extents(self) -> list[_Extent]:
        """Those of any bytes, by where they lie."""
        held = self._taken.items()
        return sorted(
            (_Extent(start, size, owner) for owner, (start, size) in held if size),
            key=lambda extent: extent.start,
        )

    def _gaps(self) -> list[tuple[int, int]]:
        """(start, size) of the gap before each extent, and after the last; of 0 bytes where there is none."""
        extents = self._extents()
        starts = [0, *(extent.end for extent in extents)]
        ends = [*(extent.start for extent in extents), self.capacity]
        return [(start, end - start) for start, end in zip(starts, ends, strict=True)]
