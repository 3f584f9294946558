"""One folder per kind of variant: from a manifest to the pieces of each layer.

A new kind is a folder here with `pieces(manifest, files, layer, dtype)`, a line in `_KINDS`, and whatever
operation it needs in `workers/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import Manifest, SvdManifest, VariantKind, VariantLimits
from workers.variant_config import VariantConfig
from workers.variants.kinds import boft, full, lora, sparse_delta, svd_delta
from workers.variants.pieces import Piece
from workers.variants.shapes import LayerShape
from workers.variants.tensors import Files

Pieces = Callable[[Any, Files, LayerShape, torch.dtype], Sequence[Piece]]

_KINDS: dict[VariantKind, Pieces] = {
    VariantKind.LORA: lora.pieces,
    VariantKind.SPARSE_DELTA: sparse_delta.pieces,
    VariantKind.SVD_DELTA: svd_delta.pieces,
    VariantKind.BOFT: boft.pieces,
}


class OpenVariant:
    """One variant's files, their headers checked against the base: `workers.variants.pieces.Contents`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files = Files(manifest)

    def pieces(self, layer: LayerShape, dtype: torch.dtype) -> Sequence[Piece]:
        given = self._manifest, self._files, layer, dtype
        return [*_KINDS[self._manifest.spec.kind](*given), *full.pieces(*given)]


def open_variant(folder: Path, base: Path, config: VariantConfig) -> OpenVariant:
    """What lies in `folder`, checked for the base in folder `base`; its data is checked when it is packed.

    Raises ValueError when it is not sound, does not fit, or is not what the engine was started for.
    """
    try:
        manifest = read_manifest(folder, read_model(base), VariantLimits(config.max_rank))
    except (CheckpointError, AdapterError) as e:
        raise ValueError(str(e)) from e
    spec = manifest.spec
    if spec.kind not in config.kinds:
        raise ValueError(
            f"this engine was started for variants of kind {', '.join(config.kinds)}, not {spec.kind}; "
            "deploy its base again once the variant is registered"
        )
    if isinstance(manifest, SvdManifest):
        svd_delta.admit(manifest, config.max_svd_rank)
    return OpenVariant(manifest)
