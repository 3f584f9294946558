"""One folder per kind of variant: from a manifest to the pieces of each layer.

A new kind is a folder here with `pieces(manifest, layer, dtype)`, a line in `_KINDS`, and whatever
operation it needs in `workers/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from profiler.checkpoint import read_model
from profiler.errors import AdapterError, CheckpointError
from profiler.variants.reading import read_manifest
from profiler.variants.types import Manifest, SvdManifest, VariantKind, VariantLimits
from profiler.variants.verifying import verify_values
from workers.variants.config import VariantConfig
from workers.variants.kinds import boft, full, lora, sparse_delta, svd_delta
from workers.variants.pieces import Piece
from workers.variants.shapes import LayerShape

Pieces = Callable[[Any, LayerShape, torch.dtype], Sequence[Piece]]

_KINDS: dict[VariantKind, Pieces] = {
    VariantKind.LORA: lora.pieces,
    VariantKind.SPARSE_DELTA: sparse_delta.pieces,
    VariantKind.SVD_DELTA: svd_delta.pieces,
    VariantKind.BOFT: boft.pieces,
}


@dataclass(frozen=True)
class OpenVariant:
    """One variant's files, checked against their base: `workers.variants.pieces.Contents`."""

    manifest: Manifest

    def pieces(self, layer: LayerShape, dtype: torch.dtype) -> Sequence[Piece]:
        own = _KINDS[self.manifest.spec.kind](self.manifest, layer, dtype)
        return [*own, *full.pieces(self.manifest, layer, dtype)]


def open_variant(folder: Path, base: Path, config: VariantConfig) -> OpenVariant:
    """What lies in `folder`, read and checked to the last byte for the base in folder `base`.

    Raises ValueError when it is not sound, does not fit, or is not what the engine was started for.
    """
    try:
        manifest = read_manifest(folder, read_model(base), VariantLimits(config.max_rank))
        verify_values(manifest)
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
