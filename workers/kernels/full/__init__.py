"""Tensors that a variant replaces: norms, the embedding, the head.

Each operation writes the rows of slots that replace the tensor, and leaves all other rows as the base wrote
them. A slot may instead have a difference D of the embedding or head, with a scale for each row. Then the
operation adds D to the base's result.
"""

from __future__ import annotations

import torch

from workers.kernels.full import reference
from workers.kernels.full.layout import (
    WIDTH,
    describe,
    describe_difference,
    difference_parts,
    pack,
    pack_difference,
    parts,
)
from workers.kernels.rows import Rows

__all__ = [
    "WIDTH",
    "add",
    "describe",
    "describe_difference",
    "difference_parts",
    "embed",
    "head",
    "norm",
    "pack",
    "pack_difference",
    "parts",
]


def norm(
    source: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, K]
    epsilon: float,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
    zero_centred: bool = False,
) -> None:
    """out = source / sqrt(mean(source^2) + epsilon) * w; if `zero_centred` (Gemma) * (1 + w), then rounded.

    `source`: the base norm's own input (the residual added). The kernel must not divide by the base's
    weights, which may be zero.
    """
    if source.shape != out.shape or source.ndim != 2 or source.dtype != out.dtype:
        raise ValueError(
            f"expected a norm's input and output of the same shape [M, K] and type, got {list(source.shape)}"
            f" of {source.dtype} and {list(out.shape)} of {out.dtype}"
        )
    _check(table)
    if out.device.type == "cpu":
        return reference.norm(source, out, epsilon, arena, table, rows, zero_centred)
    from workers.kernels.full import kernel

    return kernel.norm(source, out, epsilon, arena, table, rows, zero_centred)


def embed(
    ids: torch.Tensor,  # [M]
    out: torch.Tensor,  # [M, K]
    first: int,
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
) -> None:
    """out = E[id], or out += D[id], for ids of this rank's shard of the vocabulary, whose first id is
    `first`.

    A table row may place E at a byte outside of the arena: in host memory, which is page-locked for a GPU.
    """
    if out.ndim != 2 or ids.shape != out.shape[:1]:
        raise ValueError(f"expected ids [M] and outputs [M, K], got {list(ids.shape)} and {list(out.shape)}")
    _check(table)
    if out.device.type == "cpu":
        return reference.embed(ids, out, first, arena, table, rows)
    from workers.kernels.full import kernel

    return kernel.embed(ids, out, first, arena, table, rows)


def head(
    x: torch.Tensor,  # [M, K]
    out: torch.Tensor,  # [M, V]
    arena: torch.Tensor,
    table: torch.Tensor,
    rows: Rows,
) -> None:
    """out = x H^T, or out += x D^T, over this rank's shard of the vocabulary."""
    if x.ndim != 2 or out.ndim != 2 or len(x) != len(out):
        raise ValueError(
            f"expected a head's inputs [M, K] and outputs [M, V], got {list(x.shape)} and {list(out.shape)}"
        )
    _check(table)
    if out.device.type == "cpu":
        return reference.head(x, out, arena, table, rows)
    from workers.kernels.full import kernel

    return kernel.head(x, out, arena, table, rows)


def add(
    base: torch.Tensor,  # [rows, K]
    codes: torch.Tensor,  # int8 [rows, K]
    scales: torch.Tensor,  # float32 [rows]
    out: torch.Tensor,  # [rows, K]
) -> None:
    """Compute out = base + D, rounded once; all arrays are contiguous."""
    if not base.shape == codes.shape == out.shape or scales.shape != base.shape[:1]:
        raise ValueError(
            "expected codes, base and outputs of one shape [rows, K], and scales [rows], got "
            f"{list(codes.shape)}, {list(base.shape)}, {list(out.shape)} and {list(scales.shape)}"
        )
    if out.device.type == "cpu":
        return reference.add(base, codes, scales, out)
    from workers.kernels.full import kernel

    return kernel.add(base, codes, scales, out)


def _check(table: torch.Tensor) -> None:
    if table.shape[1] != WIDTH:
        raise ValueError(f"expected a table of {WIDTH} columns, got {table.shape[1]}")
