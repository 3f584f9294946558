"""How the two launches are divided, and the scratch memory between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels import low_rank
from workers.kernels.rows import LARGE_BLOCK, LARGE_FROM
from workers.kernels.svd_delta.layout import PLACES, Ranks, places

MAX_SLICES = 4  # the most slices of one linear
SPLITS = 2  # for batches that are decoded
# Extra places of each slice, beyond its largest rank: for the digits of ranks with more than two bits, and
# for blocks that are not full. Delta-CoMe's schedules need at most half of it.
SPARE_PLACES = 256


@dataclass(frozen=True)
class Plan:
    """How the two launches are divided.

    `splits`: parts of the columns, each shrunk by its own program. Rows are per program. Stages are Triton's;
    registers are the most per thread.
    """

    splits: int
    shrink_rows: int
    shrink_warps: int
    shrink_stages: int
    expand_rows: int
    expand_warps: int
    expand_stages: int
    shrink_registers: int | None = None
    expand_registers: int | None = None


def plan(block_m: int) -> Plan:
    """The launches for tiles of `block_m` rows.

    The plan depends on neither the linear nor the batch. So a row's result does not depend on the rest of the
    batch, and few kernels are compiled.
    """
    if block_m >= LARGE_BLOCK:
        return Plan(1, 16, 2, 2, block_m, block_m // 16, 2)
    return Plan(SPLITS, 8, 2, 4, 8, 1, 3, shrink_registers=168, expand_registers=144)


class Scratch(low_rank.Scratch):
    """Scratch memory of a singular-value launch.

    `max_rank` bounds the ranks of one slice of a linear with up to `max_slices`. The kernels trust the table,
    so its writer must `admit` its ranks first.
    """

    def __init__(self, max_rows: int, max_rank: int, device: torch.device, max_slices: int = 1) -> None:
        super().__init__(max_rows)
        self.slice_places = most_places(max_rank)
        self.places = max_slices * self.slice_places
        rows = max(max_rows, SPLITS * min(max_rows, LARGE_FROM))
        self.shrunk = torch.empty(rows * self.places, device=device)  # float32 [splits, T, places]


def most_places(max_rank: int) -> int:
    """Places for a slice of `max_rank` ranks, of which few have more than two bits."""
    return -(-max_rank // PLACES) * PLACES + SPARE_PLACES


def admit(ranks: Sequence[Ranks], max_rank: int) -> None:
    """Raise ValueError unless scratch made for `max_rank` has room for a linear's ranks."""
    for by_bits in ranks:
        needed = places([by_bits])
        if needed > most_places(max_rank):
            raise ValueError(
                f"a matrix's singular ranks take {needed} places of scratch memory, which has "
                f"{most_places(max_rank)}; use an engine for deltas of more than {max_rank} ranks"
            )
