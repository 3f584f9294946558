"""Whole weights rounded to nearest, group by group: the simplest of the baselines."""

from __future__ import annotations

import torch

from workers.compression.types import Compressed, Method, Problem


def round_to_nearest(bits: int = 4, group_size: int | None = None) -> Method:
    """Asymmetric: the grid of `group_size` weights of a row, or of the whole row (None), spans their least
    and largest, and 0.

    The last group of a row may be shorter. The size counts `bits` per weight, and per group a float16 scale
    and a zero of `bits`, each row padded to whole bytes. Raises ValueError for other than 2 to 8 bits.
    """
    if not 2 <= bits <= 8 or (group_size is not None and group_size < 1):
        raise ValueError(f"expected 2 to 8 bits and a group size above 0, got {bits} and {group_size}")

    def step(problem: Problem) -> Compressed:
        rows, columns = problem.tuned.shape
        size = group_size or columns
        groups = -(-columns // size)
        row_bytes = -(-columns * bits // 8) + -(-groups * bits // 8) + 2 * groups
        return Compressed(_rounded(problem.tuned, bits, size), rows * row_bytes)

    facts = {"bits": bits, "group_size": group_size}
    return Method(f"round-to-nearest: whole weights, {bits} bits", None, False, step, facts)


def _rounded(weights: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Rounded weights [out, in]: w = (q - zero) * scale with q and zero in 0..2^bits - 1."""
    rows, columns = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -columns % group_size)).reshape(rows, -1, group_size)
    low, high = padded.amin(dim=2, keepdim=True).clamp(max=0), padded.amax(dim=2, keepdim=True).clamp(min=0)
    top = 2**bits - 1
    scale = ((high - low) / top).half().float()
    if not bool(scale.isfinite().all()):
        raise ValueError("expected finite weights below 65504, got larger weights; check the checkpoint")
    divisor = torch.where(scale > 0, scale, 1.0)
    zero = (-low / divisor).round().clamp(0, top)
    codes = ((padded / divisor).round() + zero).clamp(0, top)
    rounded: torch.Tensor = (codes - zero) * scale
    return rounded.flatten(1)[:, :columns]
