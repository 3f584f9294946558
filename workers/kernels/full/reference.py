"""Replaced tensors in torch: the CPU's path, and the reference for tests of the GPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.kernels.full.layout import difference_parts, parts
from workers.kernels.rows import Rows
from workers.kernels.types import view, view_anywhere


def norm(
    source: torch.Tensor,
    out: torch.Tensor,
    epsilon: float,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    zero_centred: bool = False,
) -> None:
    for members, weight, _ in _replaced(source, arena, table, rows):
        x = source[members].float()
        x = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + epsilon)
        if zero_centred:
            out[members] = (x * (1 + weight[0].float())).to(out.dtype)
        else:
            out[members] = x.to(out.dtype) * weight[0]


def embed(
    ids: torch.Tensor, out: torch.Tensor, first: int, arena: torch.Tensor, table: torch.Tensor, rows: Rows
) -> None:
    for members, weight, scales in _replaced(out, arena, table, rows, anywhere=True):
        local = ids[members] - first
        here = (local >= 0) & (local < len(weight))
        own, local = members[here], local[here]
        if scales is None:
            out[own] = weight[local]
        else:
            out[own] = (out[own].float() + weight[local].float() * scales[local, None]).to(out.dtype)


def head(x: torch.Tensor, out: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, rows: Rows) -> None:
    for members, weight, scales in _replaced(x, arena, table, rows):
        count = len(weight)
        if scales is None:
            out[members, :count] = (x[members] @ weight.T).to(out.dtype)
        else:
            added = (x[members].float() @ weight.float().T) * scales
            out[members, :count] = (out[members, :count].float() + added).to(out.dtype)


def add(base: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(base.float() + codes.float() * scales[:, None])


def _replaced(
    like: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, rows: Rows, anywhere: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield, for each slot that replaces the tensor, its rows, the tensor or its codes, and the codes'
    scales.

    If `anywhere`, the arrays may lie outside of the arena. `like`: [M, K].
    """
    see = view_anywhere if anywhere else view
    for slot, members in rows.groups():
        count, at, scales_at = table[slot].tolist()
        if count and not scales_at:
            (part,) = parts(count, like.shape[1], like.dtype)
            yield members, see(arena, part, at), None
        elif count:
            codes, scales = difference_parts(count, like.shape[1])
            yield members, see(arena, codes, at), see(arena, scales, scales_at)
