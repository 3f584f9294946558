"""The column loop of compression: columns of a matrix are pruned 2:4 and rounded, one after the other.

The columns behind a column compensate its error (see `workers/compression/optimal_brain.py`). Matrices are
transposed, [columns, outputs]; outputs do not affect each other.
"""

from __future__ import annotations

import torch

from workers.kernels.column_loop import reference
from workers.kernels.column_loop.reference import FOUR, MAX_COLUMNS, or_one

__all__ = ["FOUR", "MAX_COLUMNS", "apply", "or_one"]


def apply(
    work: torch.Tensor,  # [M, N]
    kept: torch.Tensor,  # bool [K, N]
    errors: torch.Tensor,  # [K, N]
    deviations: torch.Tensor,  # [K, 1]
    answers: torch.Tensor,  # [K, M]
    scales: torch.Tensor,  # float16 [N]
    bits: int,
) -> None:
    """Fix the first K columns of M, and update the M - K columns behind them, in place.

    The loop writes `kept` and `errors`. It keeps two of every four columns, those with the largest |weight /
    deviation|; between equal columns, the earlier. Values are multiples of the output's scale from
    -2^(bits-1) to 2^(bits-1) - 1. Row j of `answers` is how each column changes per unit of error in column
    j: 0 before j, 1 at j.
    """
    columns, behind = len(kept), len(work) - len(kept)
    if columns % FOUR or behind < 0 or len(work) > MAX_COLUMNS:
        raise ValueError(
            f"expected a multiple of {FOUR} columns, and at most {MAX_COLUMNS} in all, got {columns} of "
            f"{len(work)}"
        )
    if work.device.type == "cpu" or work.dtype != torch.float32:
        rounded = reference.steps(scales.to(work.dtype), bits)
        return reference.apply(work, kept, errors, deviations, answers, rounded)
    from workers.kernels.column_loop import kernel

    return kernel.apply(work, kept, errors, deviations, answers, scales, bits)
