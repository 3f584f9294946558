"""The biases of all slices of a linear layer in one array, float32 [N]; NaN where the base's bias stays."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workers.kernels.types import Part

WIDTH = 2  # of a table row: 1 if the slot replaces the bias, and the bias's offset


def parts(outputs: int) -> tuple[Part, ...]:
    return (Part("bias", torch.float32, (outputs,)),)


def describe(offsets: Mapping[str, int]) -> tuple[int, ...]:
    return 1, offsets["bias"]


def kept(outputs: int) -> torch.Tensor:
    """The bias array of a slice whose bias is not replaced."""
    return torch.full((outputs,), torch.nan)


def pack(bias: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
    into["bias"].copy_(bias)
