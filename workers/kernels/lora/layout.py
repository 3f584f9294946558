"""The places of a LoRA adapter's arrays (LoRA, Hu et al. 2021: W + B A; B includes the scaling here).

One linear's output may be several slices (q, k, v). All slices' A are stored one below the other, as one
matrix, so that the input is read once. Each slice's B is stored transposed, so that its rows are contiguous
along the output for every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.kernels.types import Part

# A table row: [byte of A, total rank], then for each slice [byte of B, first rank, rank]. While the arrays
# are on the way to the device, the total rank is negative: readers wait until it is not.
HEAD, PER_SLICE = 2, 3
TOTAL_RANK = 1


@dataclass(frozen=True)
class Factors:
    """One slice's adapter: A [rank, inputs] and B [outputs, rank], B already scaled."""

    a: torch.Tensor
    b: torch.Tensor


def width(num_slices: int) -> int:
    """Columns of the table for a linear of `num_slices` slices."""
    return HEAD + PER_SLICE * num_slices


def parts(inputs: int, slices: Sequence[int], ranks: Sequence[int], dtype: torch.dtype) -> tuple[Part, ...]:
    """The arrays of one linear; a rank of zero means that the slice has no adapter."""
    if len(slices) != len(ranks):
        raise ValueError(f"expected a rank for each of {len(slices)} slices, got {len(ranks)} ranks")
    if min(ranks) < 0:
        raise ValueError(f"expected ranks of at least 0, got {tuple(ranks)}")
    stacked = Part("a", dtype, (sum(ranks), inputs))  # [R, K]
    expanding = [
        Part(_b(index), dtype, (rank, outputs))  # [r, N]
        for index, (outputs, rank) in enumerate(zip(slices, ranks, strict=True))
        if rank
    ]
    return (stacked, *expanding) if expanding else ()


def pack(adapter: Sequence[Factors | None], into: Mapping[str, torch.Tensor]) -> None:
    """Write one linear's factors, slice by slice, into views of the arena's parts."""
    first = 0
    for index, factors in enumerate(adapter):
        if factors is None:
            continue
        rank, outputs = factors.a.shape[0], factors.b.shape[0]
        stored = into[_b(index)]
        if factors.b.shape[1] != rank or stored.shape != (rank, outputs):
            raise ValueError(
                f"expected A and B of slice {index} for rank {stored.shape[0]} and {stored.shape[1]} "
                f"outputs, got {tuple(factors.a.shape)} and {tuple(factors.b.shape)}"
            )
        into["a"][first : first + rank].copy_(factors.a)
        stored.copy_(factors.b.T)
        first += rank


def describe(ranks: Sequence[int], offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The table's row for one linear whose parts lie at `offsets` (bytes) in the arena."""
    row, first = [offsets.get("a", 0), sum(ranks)], 0
    for index, rank in enumerate(ranks):
        row += [offsets[_b(index)], first, rank] if rank else [0, 0, 0]
        first += rank
    return tuple(row)


def _b(index: int) -> str:
    return f"b{index}"
