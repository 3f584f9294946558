"""How the two launches of a low-rank operation are divided: by shapes alone, never by data.

The pieces of the inner dimension decide the order of summation. They depend only on the linear and on whether
tiles are small or large: within either, a row's result is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import low_rank
from workers.kernels.rows import LARGE_BLOCK, LARGE_FROM, SMALL_BLOCK, max_tiles

SMALL_SPLITS, LARGE_SPLITS = 32, 4
RANK_MULTIPLE = 16
LOW_RANKS = 64  # of all slices of a linear together


@dataclass(frozen=True)
class Plan:
    """The shrink's pieces and tiles, then the expand's tiles; `warps` and `stages` as Triton means them."""

    splits: int
    chunk: int
    block_k: int
    shrink_r: int
    shrink_warps: int
    shrink_stages: int
    block_n: int
    expand_r: int
    expand_warps: int


def plan(block_m: int, inputs: int, max_rank: int) -> Plan:
    """The launches for tiles of `block_m` rows of a linear with `inputs` features."""
    large = block_m >= LARGE_BLOCK
    block_k = 64 if large else 256
    chunk = _up(-(-inputs // (LARGE_SPLITS if large else SMALL_SPLITS)), block_k)
    low = max_rank <= LOW_RANKS
    once = chunk == block_k and not low  # nothing to load ahead; with low ranks this would slow full tiles
    return Plan(
        splits=-(-inputs // chunk),
        chunk=chunk,
        block_k=block_k,
        shrink_r=(32 if low else 64) if large else (16 if low else 32),
        shrink_warps=4,
        shrink_stages=4 if large else 1 if once else 2,
        block_n=64 if large else 128,
        expand_r=16,
        expand_warps=4 if large else 2,
    )


class Scratch(low_rank.Scratch):
    """Scratch memory of a LoRA launch.

    `max_rank` bounds a slot's ranks summed over one linear's slices. The kernels trust the table, so its
    writer must have refused larger ranks.
    """

    def __init__(self, max_rows: int, num_slots: int, max_rank: int, device: torch.device) -> None:
        super().__init__(max_rows)
        self.max_rank = _up(max_rank, RANK_MULTIPLE)
        small = SMALL_SPLITS * min(max_rows, LARGE_FROM - 1)
        large = LARGE_SPLITS * max_rows if max_rows >= LARGE_FROM else 0
        floats = torch.empty((max_rows + max(small, large)) * self.max_rank, device=device)
        self.shrunk = floats[: max_rows * self.max_rank]  # float32 [T, R]
        self.pieces = floats[max_rows * self.max_rank :]  # float32 [splits, T, R]
        tiles = max(
            max_tiles(min(max_rows, LARGE_FROM - 1), num_slots, SMALL_BLOCK),
            max_tiles(max_rows, num_slots, LARGE_BLOCK),
        )
        self.arrived = torch.zeros(tiles * (self.max_rank // RANK_MULTIPLE), dtype=torch.int32, device=device)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
