"""Cholesky factors of matrices that rounding has made not quite positive definite."""

from __future__ import annotations

import torch

FIRST_SHARE = 1e-6
ATTEMPTS = 7


def lower_factor(matrix: torch.Tensor) -> torch.Tensor:
    """L [n, n], lower triangular: L L^T is `matrix` and the least share of its mean diagonal that is enough.

    Nothing is added where the matrix is positive definite; else 1e-6 of the mean diagonal, then ten times as
    much, up to all of it. Raises ValueError when that is not enough, or for values that are not finite.
    """
    lower: torch.Tensor
    lower, info = torch.linalg.cholesky_ex(matrix)
    mean = matrix.diagonal().mean().clamp_min(torch.finfo(matrix.dtype).tiny)
    for attempt in range(ATTEMPTS):
        if int(info) == 0:
            return lower
        share = FIRST_SHARE * 10**attempt
        lower, info = torch.linalg.cholesky_ex(
            matrix + torch.eye(len(matrix), device=matrix.device) * (mean * share)
        )
    if int(info) == 0:
        return lower
    raise ValueError(
        "expected inputs whose Gram matrix is positive, got one that is not; check the calibration text"
    )
