"""PEFT LoRA and rsLoRA: y += scaling * (x A^T) B^T.

A has the layer's input as columns and B its output as rows, so tensor parallelism cuts A by columns
where the input is split, and B by rows where the output is; partial sums meet in the base's reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from profiler.variants.types import LoraManifest
from workers.kernels.lora import layout
from workers.variants import tensors
from workers.variants.pieces import Piece
from workers.variants.shapes import LayerShape, LinearShape


def pieces(manifest: LoraManifest, layer: LayerShape, dtype: torch.dtype) -> Sequence[Piece]:
    if not isinstance(layer, LinearShape):
        return ()
    ranks = [_rank(manifest, part.name) for part in layer.slices]
    if not any(ranks):
        return ()

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        layout.pack(_factors(manifest, layer, dtype), into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe(ranks, offsets)

    parts = layout.parts(layer.in_size, layer.widths, ranks, dtype)
    return (Piece(layer.name, "lora", parts, fill, row),)


def _rank(manifest: LoraManifest, name: str) -> int:
    module = manifest.modules.get(name)
    return module.rank if module else 0


def _factors(
    manifest: LoraManifest, layer: LinearShape, dtype: torch.dtype
) -> Sequence[layout.Factors | None]:
    """This rank's factors of each slice; the scaling goes into B before it is rounded."""
    found: list[layout.Factors | None] = []
    for part in layer.slices:
        module = manifest.modules.get(part.name)
        if module is None:
            found.append(None)
            continue
        a = tensors.read(manifest.folder, module.a, columns=layer.columns)
        b = tensors.read(manifest.folder, module.b, rows=part.rows)
        found.append(layout.Factors(a.to(dtype), (b.float() * module.scaling).to(dtype)))
    return found
