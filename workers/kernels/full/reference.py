"""Replaced tensors in torch: what the CPU runs, and what the GPU's kernels are tested against."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from workers.kernels.full.layout import parts
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
    for members, weight in _replaced(source, arena, table, rows):
        x = source[members].float()
        x = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + epsilon)
        if zero_centred:
            out[members] = (x * (1 + weight[0].float())).to(out.dtype)
        else:
            out[members] = x.to(out.dtype) * weight[0]


def embed(
    ids: torch.Tensor, out: torch.Tensor, first: int, arena: torch.Tensor, table: torch.Tensor, rows: Rows
) -> None:
    for members, weight in _replaced(out, arena, table, rows, anywhere=True):
        local = ids[members] - first
        here = (local >= 0) & (local < len(weight))
        out[members[here]] = weight[local[here]]


def head(x: torch.Tensor, out: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, rows: Rows) -> None:
    for members, weight in _replaced(x, arena, table, rows):
        out[members, : len(weight)] = (x[members] @ weight.T).to(out.dtype)


def _replaced(
    like: torch.Tensor, arena: torch.Tensor, table: torch.Tensor, rows: Rows, anywhere: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of each slot that replaces the tensor, and the tensor in its place, outside of the arena if it
    may be `anywhere`. `like`: [M, K]."""
    for slot, members in rows.groups():
        count, at = table[slot].tolist()
        if count:
            (part,) = parts(count, like.shape[1], like.dtype)
            yield members, (view_anywhere if anywhere else view)(arena, part, at)
