"""What an engine holds of a variant: other bytes than its files have where it changes types. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from profiler.types import TensorRef
from profiler.variants.modules import EMBEDDING, HEAD, total_bytes
from profiler.variants.types import (
    BoftManifest,
    HeldBytes,
    LoraManifest,
    Manifest,
    SparseManifest,
    SvdManifest,
)
from profiler.variants.verifying import refs_of

SCALE_BYTES = 4  # of each output of a BOFT module: float32, whatever the engine's type
# The kernels read digits of two bits, so codes of three take four.
BITS_HELD = {3: 4}


def held_bytes(manifest: Manifest) -> HeldBytes:
    """What an engine's kernels take (`workers/kernels/*/layout.py`), but for alignment."""
    embedding, head = (_difference_bytes(manifest, name) for name in (EMBEDDING, HEAD))
    return HeldBytes(_values(manifest.full.values()), *_of_layers(manifest), embedding, head)


def _of_layers(manifest: Manifest) -> tuple[int, int]:
    """Numbers in the engine's own type, and bytes of all else."""
    match manifest:
        case LoraManifest():
            return _values(ref for m in manifest.modules.values() for ref in (m.a, m.b)), 0
        case BoftManifest():
            scales = SCALE_BYTES * _values(m.s for m in manifest.modules.values())
            return _values(m.r for m in manifest.modules.values()), scales
        case SparseManifest():
            return 0, total_bytes(ref for m in manifest.modules.values() for ref in refs_of(m))
        case SvdManifest():
            return 0, _svd_bytes(manifest)


def _difference_bytes(manifest: Manifest, name: str) -> int:
    difference = manifest.differences.get(name)
    return 0 if difference is None else total_bytes(difference.tensors)


def _values(refs: Iterable[TensorRef]) -> int:
    return sum(math.prod(ref.shape) for ref in refs)


def _svd_bytes(manifest: SvdManifest) -> int:
    taken = 0
    for group in (group for module in manifest.modules.values() for group in module.groups):
        for factor in (group.v, group.u):
            taken += factor.codes.size_bytes * BITS_HELD.get(group.bits, group.bits) // group.bits
            taken += sum(ref.size_bytes for ref in (factor.scales, factor.zeros) if ref is not None)
    return taken
