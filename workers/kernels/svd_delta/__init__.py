"""Singular-value deltas of many variants in one batch: y += (x V^T) U^T on each variant's rows.

On a GPU, `shrink` may run beside the base's own product on another stream; only `expand` must wait for
it. Both work on `Scratch`, which belongs to one linear at a time: from its shrink to its expand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels.rows import Rows, Tiles
from workers.kernels.svd_delta import reference
from workers.kernels.svd_delta.plan import Plan, Scratch, admit, check_slices, plan

__all__ = ["Scratch", "Shrunk", "admit", "apply", "expand", "shrink"]


@dataclass(frozen=True)
class Shrunk:
    """What the shrink left in scratch for the expand."""

    num_rows: int
    tiles: Tiles
    plan: Plan
    scratch: Scratch


def apply(
    x: torch.Tensor,  # [T, K]
    out: torch.Tensor,  # [T, N]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: tuple[int, ...],
    scratch: Scratch,
) -> None:
    """Add every variant's product to its rows of `out`; rows of the base are not touched."""
    if x.device.type == "cpu":  # without scratch
        check_slices(slices, out)
        reference.apply(x, out, arena, table, rows, slices)
    else:
        expand(out, shrink(x, arena, table, rows, scratch), arena, table, slices)


def shrink(
    x: torch.Tensor,  # [T, K]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    scratch: Scratch,
) -> Shrunk:
    """The GPU's first launch: t = x V^T, in float32, into scratch."""
    scratch.check_rows(x)
    from workers.kernels.svd_delta import kernel  # Triton need not be installed where there is no GPU

    tiles = rows.tiles(x.shape[0])
    cut = plan(tiles.block)
    kernel.shrink(x, arena, table, tiles, cut, scratch)
    return Shrunk(x.shape[0], tiles, cut, scratch)


def expand(
    out: torch.Tensor,  # [T, N]
    shrunk: Shrunk,
    arena: torch.Tensor,
    table: torch.Tensor,
    slices: tuple[int, ...],
) -> None:
    """The GPU's second launch: out += t U^T."""
    check_slices(slices, out)
    from workers.kernels.svd_delta import kernel

    kernel.expand(out, arena, table, shrunk.tiles, slices, shrunk.plan, shrunk.scratch)
