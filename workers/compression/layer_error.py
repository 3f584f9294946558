"""Equation 1 of DeltaMix: the error of a layer's outputs, over inputs like those of calibration."""

from __future__ import annotations

import torch

from workers.compression.types import Problem


def output_error(difference: torch.Tensor, gram: torch.Tensor) -> float:
    """|D X|_F^2 / tokens for D [out, in] and gram = X X^T / tokens [in, in]."""
    wide = difference.double()
    return float(((wide @ gram.double()) * wide).sum())


def relative_error(problem: Problem, weight: torch.Tensor) -> float:
    """|(W' - W) X|_F^2 / |(W - W_base) X|_F^2 for a compressed weight W' [out, in].

    0 is the fine-tune itself, 1 is the base. A layer that equals the base's has error 0 if W' does too, else
    infinity.
    """
    lost = output_error(weight - problem.tuned, problem.gram)
    whole = output_error(problem.delta, problem.gram)
    if whole == 0:
        return 0.0 if lost == 0 else float("inf")
    return lost / whole
