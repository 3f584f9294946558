"""2:4 sparsity and rounding to 4 or 2 bits together, by the column loop (DeltaZip, section 4.2).

What comes out is stored as `workers/deltas/sparse.py` stores it, whatever the matrix is: a delta
(`methods/deltacompress.py`) or whole weights (`methods/sparse_gpt.py`).
"""

from __future__ import annotations

import torch

from workers.compression.optimal_brain import FOUR, Round, eliminate
from workers.compression.types import Encoded
from workers.deltas import sparse

SWEEPS = 3
"""Turns that each group's scale gets in `refitted`; a row with one scale needs one."""


def encode(
    matrix: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int | None, refit: bool
) -> sparse.SparseCode:
    """Code [out, in] so that its product with inputs of this `gram` [in, in] changes little.

    A scale is 2 max|d| / (2^bits - 1) over a row, or over `group_size` columns of it as they are when the
    loop comes to them. `refit` fits the scales to the chosen codes afterwards. Raises ValueError as
    `sparse.encode` and `eliminate` do.
    """
    sparse.check(matrix, bits, group_size)
    grid = _Grid(bits)
    rounded, kept = eliminate(matrix, gram, keep_two, grid.start_group, group_size)
    scales = torch.stack(grid.scales, dim=1)
    positions = sparse.largest_two(kept.to(matrix.dtype))
    values = rounded.reshape(len(rounded), -1, FOUR).gather(2, positions.reshape(len(rounded), -1, 2).long())
    codes = sparse.codes_of(values.flatten(1), scales, bits)
    if refit:
        steps = rounded / _each(_or_one(scales), matrix)
        scales = refitted(matrix, gram, steps.round(), scales)
    return sparse.pack(codes, positions, scales, bits)


def keep_two(weights: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """bool [4, out]: of four columns [4, out] the two with the largest w^2 / U_jj^2, the earlier of equals.

    That is what their loss would cost once the columns behind have made up for it (SparseGPT, section 3.3).
    """
    cost = (weights / deviations).abs()
    rank = torch.arange(FOUR, device=cost.device)
    earlier = (rank.unsqueeze(0) < rank.unsqueeze(1)).unsqueeze(2)  # [this, other, 1]
    mine, other = cost.unsqueeze(1), cost.unsqueeze(0)
    ahead = (other > mine) | (earlier & (other == mine))
    return ahead.sum(dim=1) < 2


def refitted(
    matrix: torch.Tensor, gram: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Scales, float16 [out, groups], that fit the codes better: least squares of |(d - s q) X|_F^2 in s.

    `matrix` is d, `steps` q, both [out, in]. One scale per row has the closed form s = q H d / (q H q).
    Groups take turns in their order: each gets its best scale given the others', so the error never grows.
    A scale stays when its codes are all 0 or its best would not be positive.
    """
    groups = scales.shape[1]
    size = matrix.shape[1] // groups
    fitted = scales.clone()
    wide = fitted.to(matrix.dtype)
    slopes = (matrix - steps * _each(wide, matrix)) @ gram
    for _ in range(SWEEPS if groups > 1 else 1):
        for group in range(groups):
            at = slice(group * size, (group + 1) * size)
            pushed = steps[:, at] @ gram[at]
            curvature = (pushed[:, at] * steps[:, at]).sum(dim=1)
            slope = (slopes[:, at] * steps[:, at]).sum(dim=1)
            best = (wide[:, group] + slope / curvature).half()
            good = (curvature > 0) & best.isfinite() & (best > 0)
            fitted[:, group] = torch.where(good, best, fitted[:, group])
            moved = fitted[:, group].to(wide.dtype) - wide[:, group]
            slopes.addcmul_(moved.unsqueeze(1), pushed, value=-1)
            wide[:, group] += moved
    return fitted


def stored(code: sparse.SparseCode) -> Encoded:
    """A sparse delta's parts, as docs/formats.md names them."""
    return Encoded({"values": code.values, "indices": code.indices, "scales": code.scales})


class _Grid:
    """The grids of one matrix; `scales` gets each group's, float16 [out]."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.scales: list[torch.Tensor] = []

    def start_group(self, weights: torch.Tensor) -> Round:
        scale = sparse.scales_of(weights.T, self.bits, None).flatten()
        self.scales.append(scale)
        wide, half = scale.to(weights.dtype), 2 ** (self.bits - 1)
        divisor = _or_one(wide)

        def round_column(column: torch.Tensor) -> torch.Tensor:
            return (column / divisor).round_().clamp_(-half, half - 1).mul_(wide)

        return round_column


def _each(scales: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[out, groups] as [out, in], in the matrix's type."""
    return scales.to(matrix.dtype).repeat_interleave(matrix.shape[1] // scales.shape[1], dim=1)


def _or_one(scales: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: a group of zeros has scale 0."""
    return torch.where(scales > 0, scales, 1.0)
