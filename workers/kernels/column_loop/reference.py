"""The column loop in torch: the CPU's path, and the reference for tests of the kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

FOUR = 4

MAX_COLUMNS = 128
"""Columns that are fixed, or answer, at once."""

Round = Callable[[torch.Tensor], torch.Tensor]
"""The nearest values of the grid for one column [outputs]."""


def apply(
    work: torch.Tensor,
    kept: torch.Tensor,
    errors: torch.Tensor,
    deviations: torch.Tensor,
    answers: torch.Tensor,
    round_column: Round,
) -> None:
    """Run the column loop for any grid of values."""
    for at in range(0, len(kept), FOUR):
        four, behind = slice(at, at + FOUR), slice(at + FOUR, None)
        kept[four] = keep_two(work[four], deviations[four])
        _round_four(work[four], kept[four], answers[four, four], round_column, errors[four])
        work[behind].addmm_(answers[four, behind].T, errors[four], alpha=-1)


def keep_two(weights: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """bool [4, out]: of four columns [4, out] the two with the largest w^2 / U_jj^2; between equal columns,
    the earlier.

    That is the cost of dropping a column after the columns behind it have compensated (SparseGPT, section
    3.3).
    """
    cost = (weights / deviations).abs()
    rank = torch.arange(FOUR, device=cost.device)
    earlier = (rank.unsqueeze(0) < rank.unsqueeze(1)).unsqueeze(2)  # [this, other, 1]
    mine, other = cost.unsqueeze(1), cost.unsqueeze(0)
    ahead = (other > mine) | (earlier & (other == mine))
    return ahead.sum(dim=1) < 2


def steps(scales: torch.Tensor, bits: int) -> Round:
    """Multiples of the outputs' scales, of `bits` bits; outputs with scale 0 become 0."""
    half, divisor = 2 ** (bits - 1), or_one(scales)

    def round_column(column: torch.Tensor) -> torch.Tensor:
        return (column / divisor).round_().clamp_(-half, half - 1).mul_(scales)

    return round_column


def or_one(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: an output of zeros has scale 0, which becomes 1."""
    return torch.where(scales > 0, scales, 1.0)


def _round_four(
    work: torch.Tensor, kept: torch.Tensor, answers: torch.Tensor, round_column: Round, errors: torch.Tensor
) -> None:
    """Fix four columns [4, out] in place; `errors` gets each column's error."""
    for i in range(FOUR):
        rounded = round_column(work[i] * kept[i])
        torch.sub(work[i], rounded, out=errors[i])
        work[i] = rounded
        work[i + 1 :].addr_(answers[i, i + 1 :], errors[i], alpha=-1)
