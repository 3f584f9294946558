"""Copies in torch, one matrix after the other."""

from __future__ import annotations

import torch


def copy(matrix: torch.Tensor, into: torch.Tensor, scaling: float, transposed: bool) -> None:
    """Copy `matrix` to `into`; both are already cut to the rows and columns of the copy."""
    values = (matrix.float() * scaling).to(into.dtype)
    into.copy_(values.T if transposed else values)
