"""A tensor that a variant replaces whole, in the activations' type: a norm's weight [K], or this rank's
shard [vocabulary, K] of the embedding or of the head. DeltaZip leaves these uncompressed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.kernels.types import Part

WIDTH = 2  # of a table row: how many rows the tensor has (0: not replaced), where it lies


def parts(rows: int, columns: int, dtype: torch.dtype) -> tuple[Part, ...]:
    """The tensor, as it lies in memory; a norm's weight has one row."""
    return (Part("tensor", dtype, (rows, columns)),)


def describe(rows: int, offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row. `offsets`: at which byte of the arena the part begins, which may be outside."""
    return rows, offsets["tensor"]


def pack(tensor: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    """Write the tensor, [K] or [rows, K], to its part's memory."""
    into["tensor"].copy_(tensor.view(into["tensor"].shape))
