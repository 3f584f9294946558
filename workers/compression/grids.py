"""Grids of format svd_delta: value = (code - zero) * scale, one scale and zero for 128 values.

Scales are float16 numbers and zeros are integers among the codes, as stored, so that computations use the
values that engines decode. All functions take rows of different widths at once: `tops` is the largest code of
each row, 2^bits - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_HALF_MAX = 65504.0
_SHRINKING = tuple(1 - 0.05 * step for step in range(14))  # 1 to 0.35 of the range
_REFINEMENTS = 2


@dataclass(frozen=True)
class Grid:
    """The grids of values [..., n]: `scales` (float16 numbers), `zeros` (integers) and `tops`, float32 [...,
    1] each.
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    tops: torch.Tensor

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest codes, float32."""
        steps = torch.where(self.scales > 0, values / self.scales, 0.0)
        return torch.minimum((steps.round() + self.zeros).clamp_min(0), self.tops)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes - self.zeros) * self.scales

    def nearest(self, values: torch.Tensor) -> torch.Tensor:
        return self.decode(self.codes(values))


def range_grid(values: torch.Tensor, tops: torch.Tensor) -> Grid:
    """The grid from the least to the largest of values [..., n], including 0, which stays 0."""
    return _spanning(*_range(values), tops)


def search_grid(values: torch.Tensor, tops: torch.Tensor, weights: torch.Tensor) -> Grid:
    """The grid with the least sum of weights * error^2, among `range_grid` and grids that clip the range.

    `weights` [n] are the same for all values [..., n]. Two bits gain most: few values reach the ends of the
    range, and without them the other codes are closer together. Then the scale is fitted to the codes (least
    squares), if that helps.
    """
    low, high = _range(values)
    parts = torch.tensor(_SHRINKING, device=values.device)
    scales = _half((high - low) * parts / tops)
    exact = torch.where(scales > 0, -low * parts / scales, 0.0)
    candidates = Grid(
        torch.cat([scales, scales], dim=-1).unsqueeze(-1),
        _within(torch.cat([exact.floor(), exact.ceil()], dim=-1), tops).unsqueeze(-1),
        tops.unsqueeze(-1),
    )
    errors = _error(candidates, values.unsqueeze(-2), weights).squeeze(-1)
    error, at = errors.min(dim=-1, keepdim=True)
    found_scales, found_zeros = (t.squeeze(-1).gather(-1, at) for t in (candidates.scales, candidates.zeros))
    best = Grid(found_scales, found_zeros, tops)
    for _ in range(_REFINEMENTS):
        steps = best.codes(values) - best.zeros
        norm = (weights * steps * steps).sum(dim=-1, keepdim=True)
        fitted = (weights * steps * values).sum(dim=-1, keepdim=True) / norm.clamp_min(1e-30)
        scales = torch.where((norm > 0) & (fitted > 0), _half(fitted), best.scales)
        candidate = Grid(scales, best.zeros, tops)
        found = _error(candidate, values, weights)
        best = Grid(torch.where(found < error, scales, best.scales), best.zeros, tops)
        error = torch.minimum(found, error)
    return best


def _error(grid: Grid, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    difference = grid.nearest(values) - values
    return (difference * difference * weights).sum(dim=-1, keepdim=True)


def _range(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = values.aminmax(dim=-1, keepdim=True)
    return low.clamp(max=0), high.clamp(min=0)


def _spanning(low: torch.Tensor, high: torch.Tensor, tops: torch.Tensor) -> Grid:
    scales = _half((high - low) / tops)
    zeros = torch.where(scales > 0, -low / scales, 0.0).round()
    return Grid(scales, _within(zeros, tops), tops)


def _within(zeros: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    return torch.minimum(zeros.clamp_min(0), tops)


def _half(numbers: torch.Tensor) -> torch.Tensor:
    """The numbers rounded to float16. Larger numbers become its largest: the error shows such a grid."""
    return numbers.clamp_max(_HALF_MAX).half().float()
