"""Bytes that an engine holds of a variant; they differ from the files' if it changes types. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from profiler.types import ModelSpec, TensorRef
from profiler.variants.modules import EMBEDDING, HEAD, short_name, total_bytes
from profiler.variants.types import (
    SVD_GROUP,
    BoftManifest,
    HeldBytes,
    LoraManifest,
    Manifest,
    SparseManifest,
    SvdFactor,
    SvdManifest,
    VariantKind,
    VariantSpec,
)
from profiler.variants.verifying import refs_of

SCALE_BYTES = 4  # per output of a BOFT module: float32, independent of the engine's type
FLOAT16_BYTES = 2
ROW_PARALLEL = ("o_proj", "down_proj")  # TP splits their inputs, as Megatron does
# The kernels read digits of two bits, so codes of three bits take four.
BITS_HELD = {3: 4}


def held_bytes(manifest: Manifest) -> HeldBytes:
    """The memory of an engine's kernels (`workers/kernels/*/layout.py`), without alignment."""
    embedding, head = (_difference_bytes(manifest, name) for name in (EMBEDDING, HEAD))
    values, layer_bytes, whole = _of_layers(manifest)
    return HeldBytes(_values(manifest.full.values()), values, layer_bytes, embedding, head, whole)


def _of_layers(manifest: Manifest) -> tuple[int, int, int]:
    """The number of values in the engine's own type, the bytes of the rest, and how many of these bytes each
    TP rank holds whole."""
    match manifest:
        case LoraManifest():
            return _values(ref for m in manifest.modules.values() for ref in (m.a, m.b)), 0, 0
        case BoftManifest():
            scales = SCALE_BYTES * _values(m.s for m in manifest.modules.values())
            return _values(m.r for m in manifest.modules.values()), scales, 0
        case SparseManifest():
            return 0, total_bytes(ref for m in manifest.modules.values() for ref in refs_of(m)), 0
        case SvdManifest():
            return 0, *_svd_bytes(manifest)


def _difference_bytes(manifest: Manifest, name: str) -> int:
    difference = manifest.differences.get(name)
    return 0 if difference is None else total_bytes(difference.tensors)


def _values(refs: Iterable[TensorRef]) -> int:
    return sum(math.prod(ref.shape) for ref in refs)


def _svd_bytes(manifest: SvdManifest) -> tuple[int, int]:
    """Bytes of both factors, and of the factors that each TP rank holds whole: V if the outputs are split, U
    if the input is."""
    taken = whole = 0
    for name, module in manifest.modules.items():
        splits_input = short_name(name) in ROW_PARALLEL
        for group in module.groups:
            v, u = (_factor_bytes(factor, group.bits) for factor in (group.v, group.u))
            taken += v + u
            whole += u if splits_input else v
    return taken, whole


def _factor_bytes(factor: SvdFactor, bits: int) -> int:
    codes = factor.codes.size_bytes * BITS_HELD.get(bits, bits) // bits
    return codes + sum(ref.size_bytes for ref in (factor.scales, factor.zeros) if ref is not None)


def uncoded_bytes(spec: VariantSpec, base: ModelSpec, ranks: int) -> tuple[int, int]:
    """An upper bound of the additional bytes of low-rank deltas if a TP rank's share ends inside a run of
    codes: there an engine uses float16 instead. The first number is for factors that TP cuts, the second for
    factors that each rank holds whole."""
    cut = whole = 0
    for name, facts in spec.modules.items() if spec.kind is VariantKind.SVD_DELTA and ranks > 1 else ():
        out, into = base.linear_shapes[name]
        split, other = (into, out) if name in ROW_PARALLEL else (out, into)
        if split % (SVD_GROUP * ranks):
            cut += FLOAT16_BYTES * facts.rank * base.num_layers * split
            whole += FLOAT16_BYTES * facts.rank * base.num_layers * other
    return cut, whole
