"""The variants that leave the devices to make room for another. Pure: no I/O, no clock.

Eviction follows the order of last use: only the shortest prefix of variants that makes enough room is
considered. From this prefix the variants leave that free the fewest bytes. Evicting the fewest bytes of all
variants would keep a large unused variant forever, while small ones evict each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Bytes = Mapping[int, int]  # by rank
MAX_TRIED = 2000  # sets examined to find one that frees fewer bytes: two milliseconds


@dataclass(frozen=True)
class Idle:
    """A variant in a slot that no step uses, and its bytes on each rank."""

    uid: int
    sizes: Bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())


def victims(idle: Sequence[Idle], lacking: Bytes, slots: int = 0) -> tuple[int, ...] | None:
    """The uids that leave, of the `idle` variants, which come in the order of their last use, earliest first.

    `lacking`: bytes to free on each rank; at least `slots` variants must leave. None if all of them are too
    few.
    """
    count = next((n for n in range(len(idle) + 1) if _enough(idle[:n], lacking, slots)), None)
    if count is None:
        return None
    return tuple(v.uid for v in _Search(lacking, slots).fewest_bytes(idle[:count]))


def _enough(leaving: Sequence[Idle], lacking: Bytes, slots: int) -> bool:
    freed = _freed(leaving)
    return len(leaving) >= slots and all(freed.get(rank, 0) >= size for rank, size in lacking.items())


def _freed(leaving: Iterable[Idle]) -> dict[int, int]:
    freed: dict[int, int] = {}
    for variant in leaving:
        for rank, size in variant.sizes.items():
            freed[rank] = freed.get(rank, 0) + size
    return freed


@dataclass
class _Search:
    """Branch and bound over the variants that stay, the largest first."""

    lacking: Bytes
    slots: int
    _best: tuple[Idle, ...] = ()
    _tried: int = field(default=0, init=False)

    def fewest_bytes(self, candidates: Sequence[Idle]) -> tuple[Idle, ...]:
        """The candidates with the fewest bytes that make enough room, in their order; between equals, those
        used earlier.
        """
        newest_first = tuple(reversed(candidates))
        self._best = self._without_needless(newest_first)
        # stable: between equals the newest first
        by_size = sorted(newest_first, key=lambda v: -v.total_bytes)
        self._go_on((), tuple(by_size))
        return tuple(v for v in candidates if v in self._best)

    def _without_needless(self, leaving: tuple[Idle, ...]) -> tuple[Idle, ...]:
        for variant in leaving:
            fewer = tuple(v for v in leaving if v is not variant)
            if _enough(fewer, self.lacking, self.slots):
                leaving = fewer
        return leaving

    def _go_on(self, leaving: tuple[Idle, ...], undecided: tuple[Idle, ...]) -> None:
        self._tried += 1
        if self._tried > MAX_TRIED or not _enough((*leaving, *undecided), self.lacking, self.slots):
            return
        if _enough(leaving, self.lacking, self.slots):
            if _bytes(leaving) < _bytes(self._best):
                self._best = leaving
            return
        if _bytes(leaving) >= _bytes(self._best):
            return
        first, rest = undecided[0], undecided[1:]
        self._go_on(leaving, rest)
        self._go_on((*leaving, first), rest)


def _bytes(leaving: Iterable[Idle]) -> int:
    return sum(variant.total_bytes for variant in leaving)
