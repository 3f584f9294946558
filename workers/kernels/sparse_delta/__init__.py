"""Sparse deltas: 2:4 sparse, 4- or 2-bit differences from the base's weights, added to the variant's rows.

    out[rows of slot] += x[rows of slot] D_slot^T        (DeltaZip, SBMM)

`out` is the output of the base's linear, of one or more slices in one array (q, k, v or gate, up).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from workers.kernels.rows import Rows
from workers.kernels.sparse_delta import reference, squares, tensor_cores, tensor_cores_check
from workers.kernels.sparse_delta.layout import FIELDS, Delta, Shape, describe, pack, parts, width

__all__ = [
    "FIELDS",
    "Delta",
    "Shape",
    "apply",
    "describe",
    "in_squares",
    "on_tensor_cores",
    "pack",
    "parts",
    "width",
]


def in_squares(inputs: int, slices: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the deltas of such a layer are stored in squares here, for activations of `dtype`. Both packing
    and `apply` use this answer.
    """
    return on_tensor_cores(dtype) and _cut_into_squares(inputs, tuple(slices))


@functools.cache
def _cut_into_squares(inputs: int, slices: tuple[int, ...]) -> bool:
    return len(slices) <= tensor_cores.MAX_SLICES and all(squares.fits(inputs, width) for width in slices)


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether this process multiplies sparse deltas on sparse tensor cores, for activations of `dtype`."""
    # Cached after the first call: every launch asks for this.
    return dtype in tensor_cores.DTYPES and tensor_cores_check.chosen(dtype)


def apply(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, sum(slices)]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
) -> None:
    """Add every row's delta. `out`: [M, sum(slices)], `x`: [M, K], `table`: [slots, width(len(slices))]."""
    if out.ndim != 2 or x.ndim != 2 or out.shape[0] != x.shape[0] or out.shape[1] != sum(slices):
        raise ValueError(
            f"expected inputs and outputs of the same number of rows, and outputs as wide as all slices, got"
            f" {list(x.shape)}, {list(out.shape)} and {list(slices)}"
        )
    if table.shape[1] != width(len(slices)):
        raise ValueError(
            f"expected a table of {width(len(slices))} columns for {len(slices)} slices, got {table.shape[1]}"
        )
    if x.device.type == "cpu":
        return reference.apply(x, out, arena, table, rows, slices)
    if in_squares(x.shape[1], slices, x.dtype):
        return tensor_cores.apply(x, out, arena, table, rows, slices)
    from workers.kernels.sparse_delta import kernel

    return kernel.apply(x, out, arena, table, rows, slices)
