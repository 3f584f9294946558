"""LoRA in torch: the CPU's path, and the reference for tests of the kernels."""

from __future__ import annotations

import torch

from workers.kernels.lora import layout
from workers.kernels.rows import Rows
from workers.kernels.types import Part, view


def apply(
    x: torch.Tensor,  # [T, K]
    out: torch.Tensor,  # [T, N]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: tuple[int, ...],
) -> None:
    """Add each variant's (x A^T) B^T to its rows of `out`, slice by slice."""
    for slot, index in rows.groups():
        described = table[slot].tolist()
        if described[1] == 0:
            continue
        a = view(arena, Part("a", x.dtype, (described[1], x.shape[1])), described[0])
        shrunk = x[index].float() @ a.float().T  # [n, R]
        start = 0
        for outputs, (offset, first, rank) in zip(slices, _per_slice(described), strict=True):
            if rank:
                b = view(arena, Part("b", x.dtype, (rank, outputs)), offset)
                added = shrunk[:, first : first + rank] @ b.float()
                columns = out[:, start : start + outputs]
                columns[index] = (columns[index].float() + added).to(out.dtype)
            start += outputs


def _per_slice(described: list[int]) -> list[list[int]]:
    step = layout.PER_SLICE
    return [described[at : at + step] for at in range(layout.HEAD, len(described), step)]
