"""Specs of synthetic variants for measurements, as if their files had been read."""

from __future__ import annotations

from profiler.measurements import SyntheticVariant
from profiler.types import ModelSpec, adaptable_linears
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec

FLOAT_BYTES = 2  # adapters are stored in float16
DELTA_BITS_PER_WEIGHT = {4: 3, 2: 2}  # half of the codes, and a two-bit position for each kept code


def synthetic_spec(spec: ModelSpec, variant: SyntheticVariant) -> VariantSpec:
    """The spec of a variant that adapts every possible module. Raises ValueError for an unknown kind."""
    kind = VariantKind(variant.kind)
    modules = {
        name: ModuleFacts(
            _module_bytes(linear.out, linear.into, variant), variant.rank, variant.factors, variant.block_size
        )
        for name, linear in adaptable_linears(spec).items()
    }
    held = sum(facts.size_bytes for facts in modules.values())
    return VariantSpec(kind, spec.num_layers * held, modules, (variant.bits,) if variant.bits else ())


def stored_bytes(spec: ModelSpec, variant: SyntheticVariant) -> int:
    """The stored bytes of one layer."""
    return sum(facts.size_bytes for facts in synthetic_spec(spec, variant).modules.values())


def _module_bytes(out: int, into: int, variant: SyntheticVariant) -> int:
    match VariantKind(variant.kind):
        case VariantKind.LORA:
            return FLOAT_BYTES * variant.rank * (out + into)
        case VariantKind.BOFT:
            return FLOAT_BYTES * (variant.factors * into * variant.block_size + out)
        case VariantKind.SPARSE_DELTA:
            return out * into * DELTA_BITS_PER_WEIGHT[variant.bits] // 8 + FLOAT_BYTES * out
        case VariantKind.SVD_DELTA:
            raise ValueError("expected another kind than a low-rank delta: LoRA represents low-rank deltas")
