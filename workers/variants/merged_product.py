"""A linear layer's product for a batch in which some rows use their variants' merged weights."""

from __future__ import annotations

import torch

from workers.kernels.sparse_delta import in_squares, merged_rows, merging
from workers.variants.layer_context import LayerContext
from workers.variants.shapes import LinearShape


class PlainWeight:
    """A layer's weight [out, in] on this rank, as a plain tensor.

    vLLM's parameters run Python code at each use. A weight may be replaced by another parameter, but its
    memory must not change, since captured graphs would not see that.
    """

    def __init__(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        self._layer = layer
        self._shape = (shape.out_size, shape.in_size)
        self._parameter: torch.Tensor | None = None
        self._plain: torch.Tensor | None = None

    def of(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The weight; None if it is packed, quantised or not `dtype`."""
        parameter: torch.Tensor | None = getattr(self._layer, "weight", None)
        if parameter is not self._parameter:
            self._parameter, self._plain = parameter, None if parameter is None else self._checked(parameter)
        return self._plain if self._plain is not None and self._plain.dtype == dtype else None

    def _checked(self, parameter: torch.Tensor) -> torch.Tensor | None:
        plain = parameter.data
        return plain if plain.shape == self._shape and merged_rows.fits(plain) else None


def tiles(context: LayerContext, shape: LinearShape, x: torch.Tensor) -> torch.Tensor | None:
    """The tiles of the rows of `x` if some rows use merged weights in such a layer; None if no row does."""
    if not context.has("sparse_delta") or context.has("boft"):  # BOFT has its own inputs
        return None
    return context.batch.tiles_of(len(x)) if in_squares(shape.in_size, shape.widths, x.dtype) else None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cut: torch.Tensor,
    context: LayerContext,
    shape: LinearShape,
) -> torch.Tensor:
    """[rows, in] -> [rows, out]: rows of `Batch.merged` use their variants' merged weights, other rows the
    base's.

    `cut`: from `tiles`.
    """
    out = x.new_empty(len(x), shape.out_size)
    layer = merging.Layer(weight, context.arena, context.tables["sparse_delta"], shape.widths)
    with context.layout:
        merged_rows.apply(x, out, bias, layer, cut)
    return out
