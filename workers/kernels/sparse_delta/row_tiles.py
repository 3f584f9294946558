"""The rows of a batch that use merged weights (`merged_rows`), and the tiles of all its rows.

A graph's launch has as many tiles as the largest batch of its size may need (`most_tiles`). If merging would
need more tiles, fewer variants are merged.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch

from workers.kernels.rows import BASE, Int32s, Run, Staging, long_runs

ROWS = 256  # of a tile, at most
MERGED_FROM = 128  # consecutive rows of one variant, from which on it may be merged
# Values in place of a tile's slot: there is no tile; the rows from the tile's first row on are unused.
NOTHING, NOBODY = -2, -3


def most_tiles(rows: int) -> int:
    """The most tiles of a batch of `rows` rows: twice as many as without merging, and one more for unused
    rows.
    """
    return 1 - (-rows // (ROWS // 2))


def merged_runs(slots: Int32s, of: Collection[int]) -> tuple[Run, ...]:
    """The runs of rows of one slot that use merged weights, in order. `slots`: [rows]; `of`: the slots with
    sparse deltas.
    """
    chosen: list[Run] = []
    for run in sorted(long_runs(slots, of, MERGED_FROM), key=lambda run: run.start - run.end):
        if len(tiles([*chosen, run], len(slots))) > most_tiles(len(slots)):
            break
        chosen.append(run)
    return tuple(sorted(chosen, key=lambda run: run.start))


def tiles(runs: Sequence[Run], rows: int) -> Int32s:
    """The tiles of all rows, each row once: int32 [tiles, 3], slot (BASE between the runs), first row, number
    of rows.

    The last tile covers a graph's rows beyond these.
    """
    found = []
    for run in _all_of(runs, rows):
        for first in range(run.start, run.end, ROWS):
            found.append((run.slot, first, min(ROWS, run.end - first)))
    return np.array([*found, (NOBODY, rows, 0)], np.int32)


def _all_of(runs: Sequence[Run], rows: int) -> list[Run]:
    """The runs, and the base's runs before, between and behind them."""
    ordered = sorted(runs, key=lambda run: run.start)
    ends = [0, *itertools.chain.from_iterable((run.start, run.end) for run in ordered), rows]
    between = [Run(BASE, start, end) for start, end in zip(ends[::2], ends[1::2], strict=True)]
    return sorted([*ordered, *between], key=lambda run: run.start)


class RowTiles:
    """The tiles of the current batch, on a device, at an address that never changes."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self._size = most_tiles(max_rows)
        self._tiles = torch.full((3 * self._size,), NOTHING, dtype=torch.int32, device=device)
        self._staging = Staging(self._tiles, {"tiles": 3 * self._size})
        self._last: tuple[tuple[Run, ...], int] | None = None

    def update(self, runs: tuple[Run, ...], rows: int) -> None:
        if self._last == (runs, rows):
            return  # as in most steps of decoding: the device has these tiles already
        self._last = runs, rows
        made = np.full((self._size, 3), NOTHING, np.int32)
        real = tiles(runs, rows)
        made[: len(real)] = real
        self._staging.send({"tiles": made})

    def of(self, rows: int) -> torch.Tensor:
        """int32 [most_tiles, 3] for a launch over the first `rows` rows (a graph's padded size included)."""
        return self._tiles.view(-1, 3)[: most_tiles(rows)]
