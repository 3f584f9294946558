"""Singular-value deltas in torch: the CPU's path, and what the kernels are tested against."""

from __future__ import annotations

import torch

from workers.kernels.rows import Rows
from workers.kernels.svd_delta import layout
from workers.kernels.svd_delta.layout import BITS, PER_GROUP
from workers.kernels.types import Part, view


def apply(
    x: torch.Tensor,  # [T, K]
    out: torch.Tensor,  # [T, N]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: tuple[int, ...],
) -> None:
    """Add each variant's (x V^T) U^T to its rows of `out`, slice by slice."""
    for slot, index in rows.groups():
        groups = iter(table[slot].view(-1, PER_GROUP).tolist())
        inputs, start = x[index].float(), 0
        for outputs in slices:
            added = torch.zeros(len(index), outputs)
            for bits in BITS:
                rank, v_at, u_at = next(groups)
                if rank:
                    v = _read(arena, bits, rank, x.shape[1], v_at)
                    u = _read(arena, bits, rank, outputs, u_at)
                    added += inputs @ v.T @ u
            columns = out[:, start : start + outputs]
            columns[index] = (columns[index].float() + added).to(out.dtype)
            start += outputs


def _read(arena: torch.Tensor, bits: int, rank: int, columns: int, offset: int) -> torch.Tensor:
    part = Part("", torch.uint8, (layout.size_bytes(bits, rank, columns),))
    return layout.read(bits, rank, columns, view(arena, part, offset))
