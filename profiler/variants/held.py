"""What an engine holds of a variant: other bytes than its files have where it changes types. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from profiler.types import TensorRef
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
    full = _values(manifest.full.values())
    match manifest:
        case LoraManifest():
            return HeldBytes(full, _values(ref for m in manifest.modules.values() for ref in (m.a, m.b)), 0)
        case BoftManifest():
            scales = SCALE_BYTES * _values(m.s for m in manifest.modules.values())
            return HeldBytes(full, _values(m.r for m in manifest.modules.values()), scales)
        case SparseManifest():
            return HeldBytes(
                full, 0, sum(ref.size_bytes for m in manifest.modules.values() for ref in refs_of(m))
            )
        case SvdManifest():
            return HeldBytes(full, 0, _svd_bytes(manifest))


def _values(refs: Iterable[TensorRef]) -> int:
    return sum(math.prod(ref.shape) for ref in refs)


def _svd_bytes(manifest: SvdManifest) -> int:
    taken = 0
    for group in (group for module in manifest.modules.values() for group in module.groups):
        for factor in (group.v, group.u):
            taken += factor.codes.size_bytes * BITS_HELD.get(group.bits, group.bits) // group.bits
            taken += sum(ref.size_bytes for ref in (factor.scales, factor.zeros) if ref is not None)
    return taken
