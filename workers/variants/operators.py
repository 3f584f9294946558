"""The operations by name, as the layers call them and as the tables are sized for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from workers.kernels import bias, boft, full, lora, sparse_delta, svd_delta
from workers.kernels.lora import layout as lora_layout
from workers.kernels.rows import Rows
from workers.kernels.svd_delta import layout as svd_layout
from workers.variants.shapes import LayerShape, LinearShape, NormShape, VocabularyShape

if TYPE_CHECKING:
    from workers.variants.layer_context import LayerContext

# Operations that add to a linear layer's output, in this order.
ADDITIONS = ("lora", "sparse_delta", "svd_delta")
LINEAR = (*ADDITIONS, "boft", "bias")
_FULL = ("norm", "embedding", "head", "bias")
_OF_KIND = {
    "lora": ("lora",),
    "sparse_delta": ("sparse_delta", *_FULL),
    "svd_delta": ("svd_delta", *_FULL),
    "boft": ("boft", "bias"),
}
# More factors than any table row can request scratch memory for.
MAX_FACTORS = 3


def operations_for(kinds: Iterable[str]) -> frozenset[str]:
    """All operations that variants of these kinds may need."""
    return frozenset(op for kind in kinds for op in _OF_KIND[kind])


def operations_of(shape: LayerShape) -> tuple[str, ...]:
    """The operations that variants can have in such a layer."""
    match shape:
        case LinearShape():
            return LINEAR
        case NormShape():
            return ("norm",)
        case VocabularyShape():
            return ("head",) if shape.is_head else ("embedding",)


def table_width(op: str, shape: LayerShape) -> int:
    """Columns of an operation's table for such a layer."""
    return _WIDTHS[op](len(shape.slices) if isinstance(shape, LinearShape) else 1)


_WIDTHS: dict[str, Callable[[int], int]] = {
    "lora": lora_layout.width,
    "sparse_delta": sparse_delta.width,
    "svd_delta": svd_layout.width,
    "boft": boft.width,
    "bias": lambda slices: bias.WIDTH,
    "norm": lambda slices: full.WIDTH,
    "embedding": lambda slices: full.WIDTH,
    "head": lambda slices: full.WIDTH,
}


def add(
    op: str,
    x: torch.Tensor,
    out: torch.Tensor,
    context: LayerContext,
    widths: tuple[int, ...],
    but_merged: bool = False,
) -> None:
    """Compute out [T, O] += `op` of x [T, K], on the rows of variants.

    `but_merged`: skip the rows of `Batch.merged`, for sparse deltas.
    """
    rows, table, space = context.batch.tokens, context.tables[op], context.workspace
    with context.layout:
        match op:
            case "lora":
                lora.apply(x, out, context.arena, table, rows, widths, space.lora)
            case "sparse_delta":
                others = context.batch.others if but_merged else rows
                sparse_delta.apply(x, out, context.arena, table, others, widths)
            case "svd_delta":
                svd_delta.apply(x, out, context.arena, table, rows, widths, space.svd)


def rotate(x: torch.Tensor, context: LayerContext, shape: LinearShape) -> torch.Tensor:
    """The whole input [T, in] -> each slice's input on this rank, [slices, T, in here]."""
    into = x.new_empty(len(shape.slices), x.shape[0], shape.in_size)
    table, rows = context.tables["boft"], context.batch.tokens
    with context.layout:
        boft.rotate(x, into, context.arena, table, rows, start=shape.in_start, max_factors=MAX_FACTORS)
    return into


def rescale(
    out: torch.Tensor, base_bias: torch.Tensor | None, context: LayerContext, widths: tuple[int, ...]
) -> None:
    with context.layout:
        boft.rescale(out, base_bias, context.arena, context.tables["boft"], context.batch.tokens, widths)


def replace_bias(out: torch.Tensor, base_bias: torch.Tensor | None, context: LayerContext) -> None:
    with context.layout:
        bias.apply(out, base_bias, context.arena, context.tables["bias"], context.batch.tokens)


def embed(ids: torch.Tensor, out: torch.Tensor, context: LayerContext) -> None:
    """Look up the variants' embeddings. `ids` [T] count from this rank's first token."""
    with context.layout:
        full.embed(ids, out, 0, context.arena, context.tables["embedding"], context.batch.tokens)


def norm(
    out: torch.Tensor, source: torch.Tensor, epsilon: float, context: LayerContext, shape: NormShape
) -> None:
    table, rows = context.tables["norm"], context.batch.tokens
    with context.layout:
        full.norm(source, out, epsilon, context.arena, table, rows, shape.zero_centred)


def head(x: torch.Tensor, out: torch.Tensor, context: LayerContext, rows: Rows) -> None:
    """Apply the variants' heads. `rows` has the slots of the rows: `Batch.head_rows`."""
    with context.layout:
        full.head(x, out, context.arena, context.tables["head"], rows)
