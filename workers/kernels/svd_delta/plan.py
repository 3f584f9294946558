"""How the two launches are cut up, and the scratch between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels.rows import LARGE_BLOCK, LARGE_FROM, SMALL_BLOCK, max_tiles
from workers.kernels.svd_delta.layout import PANEL, RANK_BLOCK, Ranks, padded_rank

SMALL_SPLITS = 4


@dataclass(frozen=True)
class Plan:
    """Pieces of the shrink's inner dimension, in panels; `warps` and `stages` as Triton means them."""

    splits: int
    chunk: int
    shrink_warps: int
    shrink_stages: int
    expand_warps: int
    expand_stages: int


def plan(block_m: int, inputs: int) -> Plan:
    """The launches for tiles of `block_m` rows of a linear with `inputs` features."""
    large = block_m >= LARGE_BLOCK
    panels = -(-inputs // PANEL)
    chunk = -(-panels // (1 if large else SMALL_SPLITS))
    return Plan(
        splits=-(-panels // chunk),
        chunk=chunk,
        shrink_warps=4 if large else 2,
        shrink_stages=3 if large else 2,
        expand_warps=4 if large else 2,
        expand_stages=3 if large else 2,
    )


class Scratch:
    """Room on a device for the inner products of one linear at a time; shared by all layers.

    `max_rank` bounds a slot's `padded_rank` of one linear: whoever fills a table must `admit` its ranks
    first, for the kernels trust the table.
    """

    def __init__(self, max_rows: int, num_slots: int, max_rank: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_rank = -(-max_rank // RANK_BLOCK) * RANK_BLOCK
        small_rows = min(max_rows, LARGE_FROM - 1)
        self.shrunk = torch.empty(max_rows * self.max_rank, device=device)  # float32 [T, R]
        self.pieces = torch.empty(SMALL_SPLITS * small_rows * self.max_rank, device=device)  # [splits, T, R]
        tiles = max(
            max_tiles(small_rows, num_slots, SMALL_BLOCK), max_tiles(max_rows, num_slots, LARGE_BLOCK)
        )
        blocks = self.max_rank // RANK_BLOCK
        self.arrived = torch.zeros(tiles * blocks, dtype=torch.int32, device=device)

    def admit(self, ranks: Sequence[Ranks]) -> None:
        needed = padded_rank(ranks)
        if needed > self.max_rank:
            raise ValueError(
                f"A linear's rank groups take {needed} places of scratch, which was made for "
                f"{self.max_rank}; load the variant on a worker with a larger maximum rank."
            )

    def check_rows(self, x: torch.Tensor) -> None:
        if x.shape[0] > self.max_rows:
            raise ValueError(f"The batch has {x.shape[0]} rows; scratch was made for {self.max_rows}.")


def check_slices(slices: Sequence[int], out: torch.Tensor) -> None:
    if sum(slices) != out.shape[1]:
        raise ValueError(f"Slices {tuple(slices)} do not add up to the output's {out.shape[1]} columns.")
