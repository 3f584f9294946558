"""A linear layer's product for a batch in which some variants' sparse deltas are merged into its weights."""

from __future__ import annotations

import torch
from torch.nn import functional

from workers.kernels.rows import Run
from workers.kernels.sparse_delta import in_squares, merging
from workers.variants.layer_context import LayerContext
from workers.variants.shapes import LinearShape


def plain_weight(layer: torch.nn.Module, shape: LinearShape, dtype: torch.dtype) -> torch.Tensor | None:
    """The layer's weight [out, in] on this rank, unless it is packed, quantised or not `dtype`."""
    weight: torch.Tensor | None = getattr(layer, "weight", None)
    if weight is None or weight.dtype != dtype or weight.shape != (shape.out_size, shape.in_size):
        return None
    return weight if weight.stride(1) == 1 else None


def merged_runs(context: LayerContext, shape: LinearShape, dtype: torch.dtype) -> tuple[Run, ...]:
    """The rows of this batch whose deltas are merged in such a layer, if its weight is plain. `dtype`: of the
    activations."""
    runs = context.batch.merged
    if not runs or not context.has("sparse_delta") or context.has("boft"):  # which has inputs of its own
        return ()
    return runs if in_squares(shape.in_size, shape.widths, dtype) else ()


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    runs: tuple[Run, ...],
    context: LayerContext,
    shape: LinearShape,
) -> torch.Tensor:
    """[rows, in] -> [rows, out]: the rows of `runs` with their variants' merged weights, the others with the
    base's."""
    out = x.new_empty(len(x), shape.out_size)
    table, done = context.tables["sparse_delta"], 0
    for run in (*runs, Run(-1, len(x), len(x))):
        between = slice(done, run.start)
        if done < run.start:
            out[between] = functional.linear(x[between], weight, bias)
        if run.start < run.end:
            merged = merging.Weights(weight, context.arena, table[run.slot], shape.widths)
            merging.product(x[run.rows], out[run.rows], bias, merged, context.workspace.merged)
        done = run.end
    return out
