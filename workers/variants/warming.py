"""Compiles the operations' kernels before an engine reports that it is ready.

vLLM's own warm-up does not reach all of them. It samples without variants, so no head of a variant runs, and
its row counts depend on its settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from workers.kernels.rows import LARGE_FROM
from workers.variants import operators
from workers.variants.shapes import LayerShape, LinearShape, NormShape, VocabularyShape

if TYPE_CHECKING:
    from workers.variants.layer_context import LayerContext

Hooked = tuple[Any, LayerShape, "LayerContext"]  # a module, its shape, and its hooks' context


def warm_up(hooked: Iterable[Hooked], dtype: torch.dtype) -> None:
    """Run each operation of every distinct layer, for row counts of every magnitude.

    Must be called before the first batch: all rows are the base's then, and the kernels end at once. `dtype`
    is the activations' type.
    """
    seen = set()
    for module, shape, context in hooked:
        if (kind := _kind(module, shape)) in seen:
            continue
        seen.add(kind)
        # a head runs on as many rows to score prompts
        for count in _magnitudes(context.batch.tokens.max_rows):
            _run(module, shape, context, count, dtype)


def _magnitudes(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to the size at which tiles become large: nothing is compiled for more rows.

    Sparse tensor cores' kernels are all compiled when they are checked.
    """
    count = 1
    while count <= min(most, LARGE_FROM):
        yield count
        count *= 2


def _kind(module: Any, shape: LayerShape) -> tuple[Any, ...]:
    """All properties that the kernels' specialisations can depend on."""
    match shape:
        case LinearShape():
            return (shape.widths, shape.in_start, shape.in_size, shape.in_full, _bias(module) is None)
        case NormShape():
            return ("norm", shape.width, shape.zero_centred)
        case VocabularyShape():
            return (shape.is_head, *module.weight.shape)


def _run(module: Any, shape: LayerShape, context: LayerContext, count: int, dtype: torch.dtype) -> None:
    device = context.arena.device

    def values(columns: int) -> torch.Tensor:
        return torch.zeros(count, columns, dtype=dtype, device=device)

    match shape:
        case LinearShape():
            _linear(shape, context, values(shape.in_full), values(shape.out_size), _bias(module))
        case NormShape() if "norm" in context.tables:
            operators.norm(values(shape.width), values(shape.width), 1e-6, context, shape)
        case VocabularyShape(is_head=True) if "head" in context.tables:
            operators.head(values(shape.width), values(module.weight.shape[0]), context, context.batch.scored)
        case VocabularyShape(is_head=False) if "embedding" in context.tables:
            ids = torch.zeros(count, dtype=torch.int64, device=device)
            operators.embed(ids, values(shape.width), context)


def _linear(
    shape: LinearShape,
    context: LayerContext,
    whole: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Run the linear operations. `whole`: the input of all ranks, [rows, in]."""
    here = whole[:, shape.columns].contiguous()
    for op in operators.ADDITIONS:
        if op in context.tables:
            operators.add(op, here, out, context, shape.widths)
    for given in {id(b): b for b in (None, bias)}.values():  # one rank adds the bias for all
        if "boft" in context.tables:
            operators.rescale(out, given, context, shape.widths)
        if "bias" in context.tables:
            operators.replace_bias(out, given, context)
    if "boft" in context.tables:
        operators.rotate(whole, context, shape)


def _bias(module: Any) -> torch.Tensor | None:
    return getattr(module, "bias", None)
