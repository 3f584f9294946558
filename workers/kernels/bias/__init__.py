"""Biases that a variant replaces: out += variant's bias - base's bias, on the variant's rows.

A NaN in the variant's bias means that the base's bias stays.
"""

from __future__ import annotations

import torch

from workers.kernels.bias import reference
from workers.kernels.bias.layout import WIDTH, describe, kept, pack, parts
from workers.kernels.rows import Rows

__all__ = ["WIDTH", "apply", "describe", "kept", "pack", "parts"]


def apply(
    out: torch.Tensor,  # [M, N]
    base_bias: torch.Tensor | None,  # [N]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
) -> None:
    """Replace biases in `out`, which holds the base's bias if there is one. Rows of the base stay."""
    if out.ndim != 2 or (base_bias is not None and base_bias.shape != out.shape[1:]):
        given = None if base_bias is None else list(base_bias.shape)
        raise ValueError(
            f"expected a base bias with a value for each column of outputs {list(out.shape)}, got {given}"
        )
    if out.device.type == "cpu":
        return reference.apply(out, base_bias, arena, table, rows)
    from workers.kernels.bias import kernel

    return kernel.apply(out, base_bias, arena, table, rows)
