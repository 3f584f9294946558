"""The same in torch, one matrix after the other."""

from __future__ import annotations

import torch


def copy(matrix: torch.Tensor, into: torch.Tensor, scaling: float, transposed: bool) -> None:
    """`matrix` and `into` are those rows and columns that are copied."""
    values = (matrix.float() * scaling).to(into.dtype)
    into.copy_(values.T if transposed else values)
