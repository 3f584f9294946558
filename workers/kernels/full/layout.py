"""A tensor that a variant replaces: a norm's weight [K], or this rank's shard [vocabulary, K] of the
embedding or of the head. It is there whole, in the activations' type, as DeltaZip leaves it; or, of an
embedding or head, there is what is added to the base's: codes of 8 bits and a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.kernels.types import Part

# Of a table row: how many rows the tensor has (0: not replaced), where it or its codes lie, and where its
# scales do (0: it is whole).
WIDTH = 3


def parts(rows: int, columns: int, dtype: torch.dtype) -> tuple[Part, ...]:
    """The tensor, as it lies in memory; a norm's weight has one row."""
    return (Part("tensor", dtype, (rows, columns)),)


def difference_parts(rows: int, columns: int) -> tuple[Part, Part]:
    return Part("codes", torch.int8, (rows, columns)), Part("scales", torch.float32, (rows,))


def describe(rows: int, offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The slot's table row. `offsets`: at which byte of the arena the part begins, which may be outside."""
    return rows, offsets["tensor"], 0


def describe_difference(rows: int, offsets: Mapping[str, int]) -> tuple[int, ...]:
    """The same, of the parts of a difference."""
    return rows, offsets["codes"], offsets["scales"]


def pack(tensor: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    """Write the tensor, [K] or [rows, K], to its part's memory."""
    into["tensor"].copy_(tensor.view(into["tensor"].shape))


def pack_difference(codes: torch.Tensor, scales: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    """Write codes int8 [rows, K] and scales float32 [rows] to their parts' memory."""
    into["codes"].copy_(codes)
    into["scales"].copy_(scales)
