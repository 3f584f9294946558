"""What variants that are made up to measure with hold: as if their files had been read."""

from __future__ import annotations

from profiler.measurements import MadeVariant
from profiler.types import ModelSpec, adaptable_linears
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec

FLOAT_BYTES = 2  # adapters are stored in float16
DELTA_BITS_PER_WEIGHT = {4: 3, 2: 2}  # half of the codes, and a position of two bits for each kept one


def made_spec(spec: ModelSpec, made: MadeVariant) -> VariantSpec:
    """Of one that adapts every module it can. Raises ValueError for an unknown kind."""
    kind = VariantKind(made.kind)
    modules = {
        name: ModuleFacts(
            _module_bytes(linear.out, linear.into, made), made.rank, made.factors, made.block_size
        )
        for name, linear in adaptable_linears(spec).items()
    }
    held = sum(facts.size_bytes for facts in modules.values())
    return VariantSpec(kind, spec.num_layers * held, modules, (made.bits,) if made.bits else ())


def stored_bytes(spec: ModelSpec, made: MadeVariant) -> int:
    """Of one layer."""
    return sum(facts.size_bytes for facts in made_spec(spec, made).modules.values())


def _module_bytes(out: int, into: int, made: MadeVariant) -> int:
    match VariantKind(made.kind):
        case VariantKind.LORA:
            return FLOAT_BYTES * made.rank * (out + into)
        case VariantKind.BOFT:
            return FLOAT_BYTES * (made.factors * into * made.block_size + out)
        case VariantKind.SPARSE_DELTA:
            return out * into * DELTA_BITS_PER_WEIGHT[made.bits] // 8 + FLOAT_BYTES * out
        case VariantKind.SVD_DELTA:
            raise ValueError("low-rank deltas are not made up; LoRA stands for them")
