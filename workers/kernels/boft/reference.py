"""Rotations in torch: the CPU's path, and the reference for tests of the GPU's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kernels.boft.layout import FIELDS, Shape, parts, positions
from workers.kernels.rows import Rows
from workers.kernels.types import Part, view


def rotate(
    x: torch.Tensor,
    into: torch.Tensor,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    start: int = 0,
) -> None:
    window = slice(start, start + into.shape[2])
    into.copy_(x[:, window])
    for slot, members in rows.groups():
        for i in range(len(into)):
            factors, block, at = table[slot, FIELDS * i : FIELDS * i + 3].tolist()
            if factors:
                held = view(arena, Part("", x.dtype, (factors, x.shape[1] // block, block, block)), at)
                blocks = held.transpose(-1, -2)
                into[i, members] = rotated(x[members], blocks)[:, window].to(x.dtype)


def rotated(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """x Rot in float32, factor m-1 first. `x`: [M, K], `blocks`: [m, K / b, b, b], Q - I of each block."""
    x = x.to(torch.float32, copy=True)
    count, block = blocks.shape[1:3]
    for factor in reversed(range(len(blocks))):
        order = positions(x.shape[1], block, factor)
        permuted = x[:, order].view(-1, count, block).transpose(0, 1)  # [K / b, M, b]
        change = torch.bmm(permuted, blocks[factor].float()).transpose(0, 1).reshape(x.shape)
        x[:, order] += change
    return x


def rescale(
    out: torch.Tensor,
    base_bias: torch.Tensor | None,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    slices: Sequence[int],
) -> None:
    biases = torch.split(torch.zeros(out.shape[1]) if base_bias is None else base_bias.float(), list(slices))
    for slot, members in rows.groups():
        for i, columns in enumerate(torch.split(out, list(slices), dim=1)):
            factors, block, _, scale_at, biased, bias_at = table[slot, FIELDS * i : FIELDS * (i + 1)].tolist()
            if not factors:
                continue
            shape = Shape(block << (factors - 1), columns.shape[1], factors, block, bool(biased))
            _, scale, *bias = parts([shape], out.dtype)
            result = (columns[members].float() - biases[i]) * view(arena, scale, scale_at)
            result += view(arena, bias[0], bias_at) if bias else biases[i]  # only the product is scaled
            columns[members] = result.to(out.dtype)
