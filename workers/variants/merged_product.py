"""A linear layer's product for a batch in which some variants' sparse deltas are merged into its weights."""

from __future__ import annotations

import torch

from workers.kernels.rows import Run
from workers.kernels.sparse_delta import in_squares, merging
from workers.variants.layer_context import LayerContext
from workers.variants.shapes import LinearShape


class PlainWeight:
    """A layer's weight [out, in] on this rank, as a plain tensor: vLLM's parameters pass through Python at
    each use. A weight may be exchanged for another parameter, but none for another's memory, which captured
    graphs would not see either."""

    def __init__(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        self._layer = layer
        self._shape = (shape.out_size, shape.in_size)
        self._parameter: torch.Tensor | None = None
        self._plain: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.Tensor | None:
        """None where it is packed, quantised or not `dtype`."""
        parameter: torch.Tensor | None = getattr(self._layer, "weight", None)
        if parameter is not self._parameter:
            self._parameter, self._plain = parameter, None if parameter is None else self._checked(parameter)
        return self._plain if self._plain is not None and self._plain.dtype == dtype else None

    def _checked(self, parameter: torch.Tensor) -> torch.Tensor | None:
        plain = parameter.data
        return plain if plain.shape == self._shape and plain.stride(1) == 1 else None


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
    count = x.shape[0]
    out = x.new_empty(count, shape.out_size)
    table, done = context.tables["sparse_delta"], 0
    for run in (*runs, Run(-1, count, count)):
        between = slice(done, run.start)
        if done < run.start:
            merging.linear(x[between], weight, bias, out[between])
        if run.start < run.end:
            whole = run.end - run.start == count
            inputs, into = (x, out) if whole else (x[run.rows], out[run.rows])
            merged = merging.Weights(weight, context.arena, table[run.slot], shape.widths)
            merging.product(inputs, into, bias, merged, context.workspace.merged)
        done = run.end
    return out
