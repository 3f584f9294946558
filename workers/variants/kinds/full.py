"""Tensors that a variant of any kind replaces: norms, embedding, head, and biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from profiler.types import TensorRef
from profiler.variants.modules import EMBEDDING, HEAD
from profiler.variants.types import BoftManifest, Difference, Manifest
from workers.kernels.bias import layout as bias_layout
from workers.kernels.full import layout
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape, LinearShape, NormShape, VocabularyShape
from workers.variants.tensors import Files


def layer_weights(
    manifest: Manifest, files: Files, layer: LayerShape, dtype: torch.dtype
) -> Sequence[LayerWeights]:
    match layer:
        case NormShape():
            return _whole(manifest, files, (layer.name, "norm"), f"{layer.name}.weight", layer.width, dtype)
        case VocabularyShape():
            return _vocabulary(manifest, files, layer, dtype)
        case LinearShape():
            return _biases(manifest, files, layer)


def _whole(
    manifest: Manifest,
    files: Files,
    key: tuple[str, str],
    name: str,
    columns: int,
    dtype: torch.dtype,
    cut: slice | None = None,
) -> Sequence[LayerWeights]:
    """The weights of a tensor [columns] or [rows, columns]; this rank holds rows `cut`."""
    ref = manifest.full.get(name)
    if ref is None:
        return ()
    count = cut.stop - cut.start if cut else 1
    return (_piece(files, ref, key, (count, columns), dtype, cut or slice(None)),)


def _piece(
    files: Files,
    ref: TensorRef,
    key: tuple[str, str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    cut: slice,
) -> LayerWeights:
    def fill(into: Mapping[str, torch.Tensor]) -> None:
        layout.pack(files.read(ref, cut).to(dtype), into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe(shape[0], offsets)

    return LayerWeights(
        *key,
        layout.parts(*shape, dtype),
        fill,
        row,
        source=f"{ref.name} {cut}",
        files=files.holding([ref]),
        few_read=key[1] == "embedding",
    )


def _vocabulary(
    manifest: Manifest, files: Files, layer: VocabularyShape, dtype: torch.dtype
) -> Sequence[LayerWeights]:
    """The weights of an embedding or head. A tied head is the embedding, unless the variant has its own
    head.
    """
    key, name = (layer.name, "head" if layer.is_head else "embedding"), EMBEDDING
    if layer.is_head and (HEAD in manifest.full or HEAD in manifest.differences or not layer.tied):
        name = HEAD
    if (difference := manifest.differences.get(name)) is not None:
        return (_difference(files, difference, key, layer),)
    return _whole(manifest, files, key, name, layer.width, dtype, layer.rows)


def _difference(
    files: Files, difference: Difference, key: tuple[str, str], layer: VocabularyShape
) -> LayerWeights:
    cut = layer.rows
    count = cut.stop - cut.start

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        codes, scales = files.read(difference.codes, cut), files.read(difference.scales, cut)
        layout.pack_difference(codes, scales, into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return layout.describe_difference(count, offsets)

    return LayerWeights(
        *key,
        layout.difference_parts(count, layer.width),
        fill,
        row,
        source=f"{difference.codes.name} {cut}",
        files=files.holding(difference.tensors),
        few_read=not layer.is_head,
    )


def _biases(manifest: Manifest, files: Files, layer: LinearShape) -> Sequence[LayerWeights]:
    """The biases of a linear's parts, without parts with a rotation (whose operation adds the bias
    itself).
    """
    rotated = manifest.modules.keys() if isinstance(manifest, BoftManifest) else ()
    refs = [None if part.name in rotated else manifest.full.get(f"{part.name}.bias") for part in layer.slices]
    if layer.in_start or not any(refs):
        return ()

    def fill(into: Mapping[str, torch.Tensor]) -> None:
        own = [
            files.read(ref, part.rows).float() if ref else bias_layout.kept(part.size)
            for ref, part in zip(refs, layer.slices, strict=True)
        ]
        bias_layout.pack(torch.cat(own), into)

    def row(offsets: Mapping[str, int]) -> tuple[int, ...]:
        return bias_layout.describe(offsets)

    holding = files.holding(ref for ref in refs if ref)
    return (LayerWeights(layer.name, "bias", bias_layout.parts(layer.out_size), fill, row, files=holding),)
