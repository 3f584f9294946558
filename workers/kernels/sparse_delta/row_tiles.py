"""Which rows of a batch meet merged weights (`merged_rows`), and the tiles in which all its rows are cut.

A graph's launch has as many tiles as the largest batch of its size may need (`most_tiles`), so fewer variants
are merged where their rows would be cut into more.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import torch

from workers.kernels.rows import BASE, Int32s, Run, Staging, long_runs

ROWS = 256  # of a tile, at most
MERGED_FROM = 128  # rows of one variant, one after another, from which on it may be merged
# In place of a tile's slot: there is no tile; no row from the tile's first one on is anybody's.
NOTHING, NOBODY = -2, -3


def most_tiles(rows: int) -> int:
    """Of a batch of so many rows: twice as many as there are where nothing is merged, and one of `NOBODY`."""
    return 1 - (-rows // (ROWS // 2))


def merged_runs(slots: Int32s, of: Collection[int]) -> tuple[Run, ...]:
    """The runs of rows of one slot whose variant is merged for them, in order. `slots`: [rows]; `of`: those
    of sparse deltas."""
    chosen: list[Run] = []
    for run in sorted(long_runs(slots, of, MERGED_FROM), key=lambda run: run.start - run.end):
        if len(tiles([*chosen, run], len(slots))) > most_tiles(len(slots)):
            break
        chosen.append(run)
    return tuple(sorted(chosen, key=lambda run: run.start))


def tiles(runs: Sequence[Run], rows: int) -> Int32s:
    """int32 [tiles, 3], of all rows once: the slot, BASE between the runs, first row, and how many. The last
    one is of a graph's rows that are beyond these."""
    found = []
    for run in _all_of(runs, rows):
        for first in range(run.start, run.end, ROWS):
            found.append((run.slot, first, min(ROWS, run.end - first)))
    return np.array([*found, (NOBODY, rows, 0)], np.int32)


def _all_of(runs: Sequence[Run], rows: int) -> list[Run]:
    """The runs, and those of the base before, between and behind them."""
    ordered = sorted(runs, key=lambda run: run.start)
    ends = [0, *itertools.chain.from_iterable((run.start, run.end) for run in ordered), rows]
    between = [Run(BASE, start, end) for start, end in zip(ends[::2], ends[1::2], strict=True)]
    return sorted([*ordered, *between], key=lambda run: run.start)


class RowTiles:
    """The tiles of the batch that runs now, on a device, at an address that never changes."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self._size = most_tiles(max_rows)
        self._tiles = torch.full((3 * self._size,), NOTHING, dtype=torch.int32, device=device)
        self._staging = Staging(self._tiles, {"tiles": 3 * self._size})
        self._last: tuple[tuple[Run, ...], int] | None = None

    def update(self, runs: tuple[Run, ...], rows: int) -> None:
        if self._last == (runs, rows):
            return  # as in most steps of decoding: the device knows already
        self._last = runs, rows
        made = np.full((self._size, 3), NOTHING, np.int32)
        real = tiles(runs, rows)
        made[: len(real)] = real
        self._staging.send({"tiles": made})

    def of(self, rows: int) -> torch.Tensor:
        """int32 [most_tiles, 3] for a launch over the first `rows` rows (a graph's padded size included)."""
        return self._tiles.view(-1, 3)[: most_tiles(rows)]
