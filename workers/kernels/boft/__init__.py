"""BOFT adapters of many variants in one batch: rotate each row's input, and rescale its output.

    y = ((x Rot) W^T) * s + bias        (SpartanServe, section 3; PEFT's arithmetic)

q, k and v of a variant rotate their common input differently, so `rotate` writes one input per slice. The
base multiplies each slice of its weights by that slice's input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kernels.boft import reference
from workers.kernels.boft.layout import FIELDS, Rotation, Shape, describe, pack, parts, width
from workers.kernels.rows import Rows

__all__ = ["FIELDS", "Rotation", "Shape", "describe", "pack", "parts", "rescale", "rotate", "width"]


def rotate(
    x: torch.Tensor,  # [M, K]
    into: torch.Tensor,  # [S, M, columns]
    arena: torch.Tensor,
    table: torch.Tensor,  # [slots, width(S)]
    rows: Rows,
    start: int = 0,
    max_factors: int = 2,
) -> None:
    """Write columns from `start` on of every slice's rotated input; rows without a rotation are copied.

    The rotation mixes all K columns of `x`, but a rank with some of the weights' columns needs only those.
    `max_factors`: the most factors of any resident adapter; the GPU's scratch memory depends on it.
    """
    if x.ndim != 2 or into.ndim != 3 or into.shape[1] != len(x) or into.dtype != x.dtype:
        raise ValueError(
            f"expected inputs [rows, columns] and outputs [slices, rows, columns] of the same type, got"
            f" {list(x.shape)} of {x.dtype} and {list(into.shape)} of {into.dtype}"
        )
    if not 0 <= start <= start + into.shape[2] <= x.shape[1]:
        raise ValueError(f"expected columns within 0 to {x.shape[1]}, got {start} to {start + into.shape[2]}")
    _check_table(table, len(into))
    if x.device.type == "cpu":
        return reference.rotate(x, into, arena, table, rows, start)
    from workers.kernels.boft import kernel

    return kernel.rotate(x, into, arena, table, rows, start, max_factors)


def rescale(
    out: torch.Tensor,  # [M, sum(slices)]
    base_bias: torch.Tensor | None,  # [sum(slices)]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
) -> None:
    """Turn (x Rot) W^T + base_bias into y, in place; rows of the base do not change.

    The bias is the slot's own if the slot has one, otherwise the base's.
    """
    if out.ndim != 2 or out.shape[1] != sum(slices):
        raise ValueError(
            f"expected outputs as wide as all slices {list(slices)} together, got {list(out.shape)}"
        )
    if base_bias is not None and base_bias.shape != out.shape[1:]:
        raise ValueError(f"expected a bias for each of {out.shape[1]} outputs, got {list(base_bias.shape)}")
    _check_table(table, len(slices))
    if out.device.type == "cpu":
        return reference.rescale(out, base_bias, arena, table, rows, slices)
    from workers.kernels.boft import kernel

    return kernel.rescale(out, base_bias, arena, table, rows, slices)


def _check_table(table: torch.Tensor, num_slices: int) -> None:
    if table.shape[1] != width(num_slices):
        raise ValueError(
            f"expected a table of {width(num_slices)} columns for {num_slices} slices, got {table.shape[1]}"
        )
