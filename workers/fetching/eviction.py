"""Which fetched folders give up their weights, so that others have room. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.fetching.messages import NO_SPACE, FetchError

MARGIN_BYTES = 1 << 30  # of the disk, for everything else


@dataclass(frozen=True)
class Entry:
    """A fetched folder. `claimed_bytes` it will have when its fetch, if one runs, is complete."""

    name: str
    held_bytes: int
    claimed_bytes: int
    used_at_s: float
    busy: bool = False  # in use, or being fetched


@dataclass(frozen=True)
class Room:
    """`budget_bytes`: for all fetched folders; 0: no limit. `free_bytes`: what the disk has."""

    budget_bytes: int
    free_bytes: int


def evictions(
    entries: Sequence[Entry], need_bytes: int, room: Room, margin_bytes: int = MARGIN_BYTES
) -> list[str]:
    """The folders to evict for `need_bytes` more, the longest unused first. Errors: FetchError (NO_SPACE)."""
    claimed = sum(max(entry.claimed_bytes, entry.held_bytes) for entry in entries)
    pending = sum(max(0, entry.claimed_bytes - entry.held_bytes) for entry in entries)
    over_budget = claimed + need_bytes - room.budget_bytes if room.budget_bytes else 0
    over_disk = pending + need_bytes - (room.free_bytes - margin_bytes)
    evicted: list[str] = []
    for entry in sorted(entries, key=lambda e: e.used_at_s):
        if max(over_budget, over_disk) <= 0:
            break
        if not entry.busy and entry.held_bytes:
            evicted.append(entry.name)
            over_budget -= entry.held_bytes
            over_disk -= entry.held_bytes
    if over_budget > 0:
        raise FetchError(
            NO_SPACE,
            f"{need_bytes} bytes are to be fetched, but models in use leave "
            f"{max(0, need_bytes - over_budget)} bytes of the budget of {room.budget_bytes}; undeploy a "
            "model, or raise OSTINATO_SOURCE_BYTES",
        )
    if over_disk > 0:
        raise FetchError(
            NO_SPACE,
            f"{need_bytes} bytes are to be fetched, but the disk of this node's home has room for "
            f"{max(0, need_bytes - over_disk)}; free space there, undeploy a model, or use a larger disk",
        )
    return evicted
