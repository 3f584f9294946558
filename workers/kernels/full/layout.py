"""A tensor that a variant replaces: a norm's weight [K], or this rank's shard [vocabulary, K] of the
embedding or head.

The arena holds the whole tensor, in the activations' type, as DeltaZip leaves it. For an embedding or head it
may instead hold a difference from the base's tensor: codes of 8 bits and a scale for each row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.kernels.types import Part

# A table row: number of rows of the tensor (0: not replaced), offset of the tensor or its codes, and offset
# of its scales (0: the tensor is whole).
WIDTH = 3


def parts(rows: int, columns: int, dtype: torch.dtype) -> tuple[Part, ...]:
    """The tensor, as it lies in memory; a norm's weight has one row."""
    return (Part("tensor", dtype, (rows, columns)),)


def difference_parts(rows: int, columns: int) -> tuple[Part, Part]:
    return Part("codes", torch.int8, (rows, columns)), Part("scales", torch.float32, (rows,))


def describe(rows: int, offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row. `offsets`: the byte of the arena where the part begins; it may be outside."""
    return rows, offsets["tensor"], 0


def describe_difference(rows: int, offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row, for the parts of a difference."""
    return rows, offsets["codes"], offsets["scales"]


def pack(tensor: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    """Write the tensor, [K] or [rows, K], to its part's memory."""
    into["tensor"].copy_(tensor.view(into["tensor"].shape))


def pack_difference(codes: torch.Tensor, scales: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    """Write codes int8 [rows, K] and scales float32 [rows] to their parts' memory."""
    into["codes"].copy_(codes)
    into["scales"].copy_(scales)
