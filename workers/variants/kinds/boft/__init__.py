"""PEFT BOFT: y = ((x Rot) W^T) * s + bias.

A rotation mixes the whole input, so every rank holds all of it; s and bias are cut like the output. Cayley's
formula makes the blocks orthogonal here, in float64 (`workers.deltas.boft`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from profiler.variants.types import BoftManifest, BoftModule
from profiler.variants.verifying import refs_of
from workers.deltas.boft import cayley
from workers.kernels.boft import layout
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, LinearShape, Slice
from workers.variants.tensors import Files


def layer_weights(
    manifest: BoftManifest, files: Files, layer: LayerShape, dtype: torch.dtype
) -> Sequence[LayerWeights]:
    if not isinstance(layer, LinearShape):
        return ()
    modules = [manifest.modules.get(part.name) for part in layer.slices]
    shapes = [
        _shape(manifest, module, part, layer) if module else None
        for module, part in zip(modules, layer.slices, strict=True)
    ]
    if not any(shapes):
        return ()

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        rotations = [
            _rotation(manifest, files, module, part, layer) if module else None
            for module, part in zip(modules, layer.slices, strict=True)
        ]
        layout.pack(rotations, into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe(shapes, offsets)

    refs = [ref for module in modules if module for ref in refs_of(module)]
    refs += [ref for part in layer.slices if (ref := manifest.full.get(f"{part.name}.bias"))]
    parts = layout.parts(shapes, dtype)
    return (LayerWeights(layer.name, "boft", parts, fill, row, files=files.holding(refs)),)


def _shape(manifest: BoftManifest, module: BoftModule, part: Slice, layer: LinearShape) -> layout.Shape:
    biased = adds_bias(manifest, part, layer)
    return layout.Shape(layer.in_full, part.size, module.factors, module.block_size, biased)


def adds_bias(manifest: BoftManifest, part: Slice, layer: LinearShape) -> bool:
    """Whether this rank adds the part's bias: if the input is split, one rank adds it for all."""
    return f"{part.name}.bias" in manifest.full and layer.in_start == 0


def _rotation(
    manifest: BoftManifest, files: Files, module: BoftModule, part: Slice, layer: LinearShape
) -> layout.Rotation:
    blocks = cayley(files.read(module.r))
    bias = None
    if adds_bias(manifest, part, layer):
        bias = files.read(manifest.full[f"{part.name}.bias"], part.rows).float()
    scale = files.read(module.s, part.rows).flatten().float()
    return layout.Rotation(blocks - torch.eye(module.block_size, dtype=torch.float64), scale, bias)
