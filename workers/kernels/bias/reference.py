"""Biases in torch: the CPU's path, and the reference for tests of the kernel."""

from __future__ import annotations

import torch

from workers.kernels.bias.layout import parts
from workers.kernels.rows import Rows
from workers.kernels.types import view


def apply(
    out: torch.Tensor, base_bias: torch.Tensor | None, arena: torch.Tensor, table: torch.Tensor, rows: Rows
) -> None:
    for slot, members in rows.groups():
        present, at = table[slot].tolist()
        if present:
            bias = view(arena, parts(out.shape[1])[0], at)
            change = bias if base_bias is None else bias - base_bias.float()
            change = torch.where(bias.isnan(), 0.0, change)
            out[members] = (out[members].float() + change).to(out.dtype)
