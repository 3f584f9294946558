"""PEFT LoRA and rsLoRA: y += scaling * (x A^T) B^T.

A's columns are the layer's input and B's rows its output. So tensor parallelism cuts A by columns if the
input is split, and B by rows if the output is. The base's reduction adds the partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from profiler.variants.types import LoraManifest, LoraModule
from profiler.variants.verifying import refs_of
from workers.kernels.lora import layout
from workers.kernels.types import Part
from workers.variants.copies import MatrixCopy, possible
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, LinearShape
from workers.variants.tensors import Files


def layer_weights(
    manifest: LoraManifest, files: Files, layer: LayerShape, dtype: torch.dtype
) -> Sequence[LayerWeights]:
    if not isinstance(layer, LinearShape):
        return ()
    modules = [manifest.modules.get(part.name) for part in layer.slices]
    ranks = [module.rank if module else 0 for module in modules]
    if not any(ranks):
        return ()

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        layout.pack(_factors(modules, files, layer, dtype), into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe(ranks, offsets)

    parts = layout.parts(layer.in_size, layer.widths, ranks, dtype)
    refs = [ref for module in modules if module for ref in refs_of(module)]
    copies: tuple[MatrixCopy, ...] = ()
    if possible(files.file_of(refs[0]), refs, dtype):
        copies = tuple(_copies(modules, files, layer, parts))
    return (LayerWeights(layer.name, "lora", parts, fill, row, files=files.holding(refs), copies=copies),)


def _copies(
    modules: Sequence[LoraModule | None], files: Files, layer: LinearShape, parts: Sequence[Part]
) -> Iterator[MatrixCopy]:
    """Copies with the same result as `layout.pack` of `_factors`."""
    stacked, *expanding = parts
    first, each = 0, iter(expanding)
    for module, part in zip(modules, layer.slices, strict=True):
        if module is not None:
            file, whole = files.file_of(module.a), slice(None)
            yield MatrixCopy(file, module.a, whole, layer.columns, stacked, first_row=first)
            yield MatrixCopy(
                file, module.b, part.rows, whole, next(each), scaling=module.scaling, transposed=True
            )
            first += module.rank


def _factors(
    modules: Sequence[LoraModule | None], files: Files, layer: LinearShape, dtype: torch.dtype
) -> Sequence[layout.Factors | None]:
    """This rank's factors of each slice; B is scaled before it is rounded."""
    factors: list[layout.Factors | None] = []
    for module, part in zip(modules, layer.slices, strict=True):
        if module is None:
            factors.append(None)
            continue
        a = files.read(module.a, columns=layer.columns)
        b = files.read(module.b, rows=part.rows)
        factors.append(layout.Factors(a.to(dtype), (b.float() * module.scaling).to(dtype)))
    return factors
