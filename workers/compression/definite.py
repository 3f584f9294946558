"""Cholesky factors of matrices that rounding has made not quite positive definite."""

from __future__ import annotations

import torch

# of the mean diagonal: added until the matrix is positive definite
SHARES = tuple(10.0**power for power in range(-6, 1))


def lower_factor(matrix: torch.Tensor) -> torch.Tensor:
    """L [n, n], lower triangular: L L^T is `matrix` plus the least sufficient share of its mean diagonal.

    Nothing is added if the matrix is positive definite; else 1e-6 of the mean diagonal, then ten times as
    much, up to all of it. Raises ValueError if that is not enough, or for values that are not finite.
    """
    mean = matrix.diagonal().mean().clamp_min(torch.finfo(matrix.dtype).tiny)
    for share in (0.0, *SHARES):
        lower: torch.Tensor
        lower, info = torch.linalg.cholesky_ex(_plus(matrix, share * mean) if share else matrix)
        if int(info) == 0:
            return lower
    raise ValueError(
        "expected inputs whose Gram matrix is positive, got another matrix; check the calibration text"
    )


def _plus(matrix: torch.Tensor, on_diagonal: torch.Tensor) -> torch.Tensor:
    found = matrix.clone()
    found.diagonal().add_(on_diagonal)
    return found
