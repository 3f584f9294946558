"""One folder per kind of variant: from a manifest to the weights of each layer.

A new kind needs a folder here with `layer_weights(manifest, files, layer, dtype)` and a line in `_KINDS`;
docs/variants.md has the other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from profiler.types import ModelSpec
from profiler.variants.reading import read_manifest
from profiler.variants.types import Manifest, SvdManifest, VariantKind, VariantLimits
from workers.variant_config import REMEDY, VariantConfig
from workers.variants.kinds import boft, full, lora, sparse_delta, svd_delta
from workers.variants.layer_weights import LayerWeights
from workers.variants.shapes import LayerShape
from workers.variants.tensors import Files

Reader = Callable[[Any, Files, LayerShape, torch.dtype], Sequence[LayerWeights]]

_KINDS: dict[VariantKind, Reader] = {
    VariantKind.LORA: lora.layer_weights,
    VariantKind.SPARSE_DELTA: sparse_delta.layer_weights,
    VariantKind.SVD_DELTA: svd_delta.layer_weights,
    VariantKind.BOFT: boft.layer_weights,
}


class OpenVariant:
    """One variant's files, their headers checked against the base: a `layer_weights.Contents`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files = Files(manifest)

    def layer_weights(self, layer: LayerShape, dtype: torch.dtype) -> Sequence[LayerWeights]:
        given = self._manifest, self._files, layer, dtype
        return [*_KINDS[self._manifest.spec.kind](*given), *full.layer_weights(*given)]


def open_variant(folder: Path, base: ModelSpec, config: VariantConfig) -> OpenVariant:
    """Open the variant in `folder` and check it against the base; its data is checked when it is packed.

    Raises CheckpointError if it is invalid. Raises another ValueError if it does not fit the base, or the
    engine was not started for it.
    """
    manifest = read_manifest(folder, base, VariantLimits(config.max_rank))
    spec = manifest.spec
    if spec.kind not in config.kinds:
        raise ValueError(
            f"this engine was started for variants of the kinds {', '.join(config.kinds)}, not {spec.kind}; "
            f"{REMEDY}"
        )
    if isinstance(manifest, SvdManifest):
        svd_delta.admit(manifest, config.max_svd_rank)
    return OpenVariant(manifest)
