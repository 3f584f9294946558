"""2:4 sparsity and rounding to 4 or 2 bits together, by the column loop (DeltaZip, section 4.2).

The result is stored as in `workers/deltas/sparse.py`, for any matrix: a delta (`methods/deltacompress.py`) or
whole weights (`methods/sparse_gpt.py`).
"""

from __future__ import annotations

import functools

import torch

from workers.compression.optimal_brain import Fix, eliminate
from workers.deltas import sparse
from workers.kernels import column_loop
from workers.kernels.column_loop import FOUR, or_one

SWEEPS = 3
"""Turns that each group's scale gets in `refitted`; a row with one scale needs one."""

SHARES = (1.0, 1.3, 0.75, 0.5)
"""Scales to try for each row, relative to the scale that holds the row's largest value.

A larger scale leaves room for the errors that columns take over from earlier columns. Deltas of a short
training, whose values have similar sizes, need this room. A smaller scale clamps a few large values and is
finer for the other values.
"""


def encode(
    matrix: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int | None, refit: bool
) -> sparse.SparseCode:
    """Code [out, in] such that its product with inputs of this `gram` [in, in] changes little.

    A scale is 2 max|d| / (2^bits - 1) over a row, or over `group_size` columns of it when the loop reaches
    them. With `refit` the loop runs with each of `SHARES` of that. The scales are fitted to the chosen codes,
    and each row keeps the version with the least loss; it takes four times the memory. Raises ValueError like
    `sparse.encode` and `eliminate`.
    """
    sparse.check(matrix, bits, group_size)
    shares = SHARES if refit else (1.0,)
    tried = matrix.repeat(len(shares), 1)  # rows do not affect each other: one loop for all shares
    grid = _Grid(bits, matrix.new_tensor(shares).repeat_interleave(len(matrix)))
    rounded, kept = eliminate(tried, gram, grid.start_group, group_size)
    scales = torch.stack(grid.scales, dim=1)
    if refit:
        steps = (rounded / _each(or_one(scales), matrix)).round()
        fitted, errors = refitted(matrix, gram, steps, scales)
        best = _least(errors, len(shares))
        rounded, kept, scales, fitted = rounded[best], kept[best], scales[best], fitted[best]
    return _pack(rounded, kept, scales, fitted if refit else scales, bits)


def refitted(
    matrix: torch.Tensor, gram: torch.Tensor, steps: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, float16 [tries * out, groups], that fit the codes better, and the loss of each row with them.

    They are the least squares of |(d - s q) X|_F^2 in s. `matrix` is d [out, in], and `steps` are q [tries *
    out, in] of several tries. One scale per row has the closed form s = q H d / (q H q), whatever it was
    before; so only H d is needed, once for all tries. Groups take turns in order: each gets its best scale
    given the others', so the error never grows. A scale stays if its codes are all 0 or its best value would
    not be positive.
    """
    groups = scales.shape[1]
    size = matrix.shape[1] // groups
    fitted, tries = scales.clone(), len(steps) // len(matrix)
    wide = fitted.to(matrix.dtype) if groups > 1 else torch.zeros_like(fitted, dtype=matrix.dtype)
    slopes = (matrix @ gram).repeat(tries, 1)
    if groups > 1:
        slopes.addmm_(steps * _each(wide, matrix), gram, alpha=-1)
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
    left = matrix.repeat(tries, 1).addcmul_(steps, _each(wide, matrix), value=-1)
    return fitted, (slopes * left).sum(dim=1)


class _Grid:
    """The grids of one matrix; `scales` collects each group's, float16 [out]."""

    def __init__(self, bits: int, shares: torch.Tensor) -> None:
        self.bits, self.shares = bits, shares
        self.scales: list[torch.Tensor] = []

    def start_group(self, weights: torch.Tensor) -> Fix:
        scale = sparse.scales_of(weights.T * self.shares.unsqueeze(1), self.bits, None).flatten()
        self.scales.append(scale)
        return functools.partial(column_loop.apply, scales=scale, bits=self.bits)


def _pack(
    rounded: torch.Tensor, kept: torch.Tensor, grid: torch.Tensor, scales: torch.Tensor, bits: int
) -> sparse.SparseCode:
    """The codes of the values rounded to `grid`, stored with `scales`, both float16 [out, groups]."""
    positions = sparse.largest_two(kept.to(rounded.dtype))
    fours, places = (m.reshape(len(rounded), -1, size) for m, size in ((rounded, FOUR), (positions, 2)))
    values = fours.gather(2, places.long()).flatten(1)
    return sparse.pack(sparse.codes_of(values, grid, bits), positions, scales, bits)


def _least(errors: torch.Tensor, tries: int) -> torch.Tensor:
    """The index of the try with the least loss, for each row; `errors` are [tries * out]."""
    errors = errors.view(tries, -1)
    rows = torch.arange(errors.shape[1], device=errors.device)
    return errors.argmin(dim=0) * errors.shape[1] + rows


def _each(scales: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[out, groups] as [out, in], in the matrix's type."""
    return scales.to(matrix.dtype).repeat_interleave(matrix.shape[1] // scales.shape[1], dim=1)
