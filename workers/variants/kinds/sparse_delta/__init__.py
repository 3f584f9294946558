"""2:4 sparse deltas of 4 or 2 bits (DeltaZip): y += x D^T.

Rows of the stored arrays are outputs and are cut like the output. Columns are groups of the input and are cut
like the input, so a rank's share must not divide a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from profiler.variants.types import SparseManifest, SparseModule
from profiler.variants.verifying import refs_of
from workers.kernels.sparse_delta import in_squares, layout
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, LinearShape, Slice
from workers.variants.tensors import Files

# Columns whose indices share a byte.
COLUMNS_PER_BYTE = 8


def layer_weights(
    manifest: SparseManifest, files: Files, layer: LayerShape, dtype: torch.dtype
) -> Sequence[LayerWeights]:
    if not isinstance(layer, LinearShape):
        return ()
    modules = [manifest.modules.get(part.name) for part in layer.slices]
    squares = in_squares(layer.in_size, layer.widths, dtype)
    shapes = [
        _shape(module, part, layer, squares) if module else None
        for module, part in zip(modules, layer.slices, strict=True)
    ]
    if not any(shapes):
        return ()

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        deltas = [
            _delta(files, module, part, layer) if module else None
            for module, part in zip(modules, layer.slices, strict=True)
        ]
        layout.pack(deltas, into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe(shapes, offsets)

    refs = (ref for module in modules if module for ref in refs_of(module))
    parts = layout.parts(shapes)
    return (LayerWeights(layer.name, "sparse_delta", parts, fill, row, files=files.holding(refs)),)


def _shape(module: SparseModule, part: Slice, layer: LinearShape, squares: bool) -> layout.Shape:
    """This rank's share of a module. Raises ValueError if the share cuts through a group."""
    whole_row = module.group_size == layer.in_full
    unit = COLUMNS_PER_BYTE if whole_row else module.group_size
    if layer.in_start % unit or layer.in_size % unit:
        raise ValueError(
            f"{part.name}: this rank has columns {layer.in_start} to {layer.in_start + layer.in_size} of "
            f"{layer.in_full}, but groups of {unit} columns cannot be split; use another tensor parallelism"
        )
    scales = 1 if whole_row else layer.in_size // module.group_size
    return layout.Shape(part.size, layer.in_size, module.bits, scales, squares)


def _delta(files: Files, module: SparseModule, part: Slice, layer: LinearShape) -> layout.Delta:
    def cut(columns_per_item: int) -> slice:
        return slice(layer.in_start // columns_per_item, (layer.in_start + layer.in_size) // columns_per_item)

    whole_row = module.group_size == layer.in_full
    return layout.Delta(
        values=files.read(module.values, part.rows, cut(4 if module.bits == 4 else 8)),
        indices=files.read(module.indices, part.rows, cut(COLUMNS_PER_BYTE)),
        scales=files.read(module.scales, part.rows, slice(None) if whole_row else cut(module.group_size)),
    )
