"""A linear layer's biases of all its slices side by side, float32 [N]; NaN where what is there is kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.kernels.types import Part

WIDTH = 2  # of a table row: 1 if the slot replaces the bias, and where it lies


def parts(outputs: int) -> tuple[Part, ...]:
    return (Part("bias", torch.float32, (outputs,)),)


def describe(offsets: Mapping[str, int]) -> tuple[int, ...]:
    return 1, offsets["bias"]


def kept(outputs: int) -> torch.Tensor:
    """Of a slice whose bias is not replaced."""
    return torch.full((outputs,), torch.nan)


def pack(bias: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    into["bias"].copy_(bias)
