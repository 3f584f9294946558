"""Batches and adapters that the kernels' tests share."""

from __future__ import annotations

import numpy as np
import torch

from workers.kernels.rows import BASE, LARGE_BLOCK, Rows

CPU = torch.device("cpu")
POISON = -(2**30)  # a slot or a row that would fault if a kernel used it


def rows_of(slots: list[int], num_slots: int, padded: int | None = None) -> Rows:
    """The rows of a batch of `slots`, with room for `padded` rows, of which the rest are in no tile."""
    rows = Rows(padded or max(1, len(slots)), num_slots, CPU)
    rows.update(np.array(slots, np.int32))
    return rows


def poisoned(rows: Rows) -> Rows:
    """The same with every unused entry of `order` set to nonsense."""
    rows.tiles(1).order[len(rows.grouping.order) :] = POISON
    return rows


def with_large_tiles(rows: Rows) -> Rows:
    """The same, cut as a prefill is, however few rows there are."""
    large = rows._parts["large"].view(-1, 3)

    def tiles(num_rows: int):
        from workers.kernels.rows import Tiles, max_tiles

        most = max_tiles(num_rows, rows.num_slots, LARGE_BLOCK)
        return Tiles(LARGE_BLOCK, most, large[:most], rows._parts["order"])

    rows.tiles = tiles
    return rows


def some_slots(seed: int, count: int, num_slots: int) -> list[int]:
    """Random slots, the base among them."""
    return np.random.default_rng(seed).integers(BASE, num_slots, count).tolist()
