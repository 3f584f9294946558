"""Which bytes of an arena are taken: first fit over extents."""

from __future__ import annotations


class ArenaAllocator:
    """Non-overlapping [start, start + size) in `capacity` bytes, one per owner (a slot)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: dict[int, tuple[int, int]] = {}

    def take(self, owner: int, size: int) -> int | None:
        """The start of the first gap of `size` bytes, now the owner's; None when there is no such gap."""
        if owner in self._taken:
            raise ValueError(f"owner {owner} holds an extent already; give it back first")
        if size == 0:  # an extent of nothing must not part a gap in two
            self._taken[owner] = (0, 0)
            return 0
        start = 0
        for at, length in sorted(self._taken.values()):
            if at - start >= size:
                break
            start = at + length
        if self.capacity - start < size:
            return None
        self._taken[owner] = (start, size)
        return start

    def give_back(self, owner: int) -> None:
        """Giving back what one does not hold does nothing."""
        self._taken.pop(owner, None)

    @property
    def taken_bytes(self) -> int:
        return sum(size for _, size in self._taken.values())

    def size_of(self, owner: int) -> int:
        return self._taken.get(owner, (0, 0))[1]
