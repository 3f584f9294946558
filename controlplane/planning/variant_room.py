"""Memory for the variants of a base: what an engine reserves, and how many variants it runs at once. Pure.

An engine has slots for as many variants as may run in one batch. Its room is the memory of the largest
registered variants together, with LoRA adapters of the largest rank in the remaining slots. So any set of
variants that fills the slots fits. Ranks move variants (`workers.variants.arena_allocator`), so gaps waste no
byte of the room. If devices have less memory, there is room for fewer variants at once.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.profiling.keys import engine_dtype, served_spec
from controlplane.profiling.usual_engine import BATCHED_TOKENS
from controlplane.settings import Settings
from controlplane.state.records import Model
from placement.types import EngineSizes, Placement
from profiler.roofline import MOVED_AT_ONCE_BYTES, arena_bytes
from profiler.shards import tp_fits
from profiler.types import ModelSpec, Plan, adaptable_linears
from profiler.variants.held import uncoded_bytes
from profiler.variants.modules import EMBEDDING
from profiler.variants.types import HeldBytes, VariantKind, VariantSpec

# What alignment in an engine's memory adds to a variant's bytes, estimated generously.
PACKING = 1.05
ALIGNMENT = 128  # of each array there (`workers.kernels.types`)

Line = tuple[int, int]  # bytes of a rank: outside its layers, and for each layer
Room = tuple[tuple[int, tuple[Line, ...]], ...]  # in the form of `Plan.room`


@dataclass(frozen=True)
class Demand:
    """Bytes of a variant: in hidden layers `sharded` over TP ranks or `whole` on each, and `full` tensors."""

    sharded: int
    whole: int
    full: int


@dataclass(frozen=True)
class AtOnce:
    """Any `count` of a base's `registered` variants fit into its engines together; `too_large`: the names of
    variants that do not even fit alone."""

    registered: int
    count: int
    too_large: tuple[str, ...] = ()


def rooms(variants: Sequence[Model], spec: ModelSpec, sizes: EngineSizes) -> tuple[Room, ...]:
    """The possible rooms of an engine, the largest first: for variants in all slots; for the registered
    variants together, as far as there are slots; for one fewer each; for one. Each has room for a LoRA
    adapter."""
    if not spec.adaptable:
        return ((),)
    registered = [variant.variant_spec for variant in variants if variant.variant_spec]
    slots, rank = sizes.variant_slots or 1, sizes.lora_rank or 1
    by_degree = {tp: _large_lines(registered, spec, tp, slots) for tp in _degrees(spec)}
    spare = {tp: lora_line(spec, rank, tp) for tp in by_degree}

    def room(spares: int, count: int) -> Room:
        """The room for the `count` largest registered variants and `spares` spare LoRA adapters."""
        return tuple(
            (tp, _with_moves(largest([*lines, *[spare[tp]] * spares], count, spec.num_layers)))
            for tp, lines in by_degree.items()
        )

    together = min(len(registered), slots)
    fewer = [room(1, count) for count in range(together, 0, -1)]
    if not registered:
        fewer = [room(count, count) for count in range(slots - 1, 0, -1)]
    return tuple(dict.fromkeys((room(slots, slots), *fewer)))


def with_room_for_variants(
    plan: Plan, spec: ModelSpec, sizes: EngineSizes, variants: Sequence[Model], room: Room | None = None
) -> Plan:
    """The plan with slots of these `sizes` for the base's `variants`. `room`: one of `rooms`; None: the
    largest."""
    return dataclasses.replace(
        plan,
        max_variants=sizes.variant_slots or 0,
        max_lora_rank=sizes.lora_rank or 0,
        variant_host_bytes=sizes.variant_host_bytes or 0,
        room=rooms(variants, spec, sizes)[0] if room is None else room,
        batched_tokens=BATCHED_TOKENS,
        merged_slot=bool(sizes.merged_slot),
    )


def _degrees(base: ModelSpec) -> list[int]:
    return [tp for tp in range(1, base.num_heads + 1) if tp_fits(base, tp)]


def _with_moves(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple((MOVED_AT_ONCE_BYTES + fixed, each) for fixed, each in lines)


def _large_lines(registered: Sequence[VariantSpec], base: ModelSpec, tp: int, count: int) -> list[Line]:
    """Lines of the variants that may be among the `count` largest in a stage. A variant is left out if
    `count` others are larger with one layer and with all layers, and therefore with any number of layers."""
    alike: dict[Any, Line] = {}
    lines = [_known_line(variant, base, tp, alike) for variant in registered]
    kept, seen = list[Line](), list[int]()
    for line in sorted(lines, key=lambda line: _at(line, base.num_layers), reverse=True):
        alone = _at(line, 1)
        if len(seen) - bisect_left(seen, alone) < count:
            kept.append(line)
        insort(seen, alone)
    return kept


def _known_line(variant: VariantSpec, base: ModelSpec, tp: int, alike: dict[Any, Line]) -> Line:
    """The line of a variant, computed once per shape: hundreds of adapters have the same shape."""
    ranks = tuple((name, facts.rank) for name, facts in variant.modules.items())
    tables = variant.replaces_embedding, variant.replaces_head
    key = (variant.kind, variant.weight_bytes, variant.full_bytes, variant.held, *tables, ranks)
    if key not in alike:
        alike[key] = rank_line(variant, base, tp)
    return alike[key]


def largest(lines: Sequence[Line], count: int, layers: int) -> tuple[Line, ...]:
    """Lines whose maximum is the memory of the `count` largest of `lines` together, for 1 to `layers`
    layers."""
    return tuple(dict.fromkeys(_largest(lines, count, 1, layers)))


def _largest(lines: Sequence[Line], count: int, first: int, last: int) -> Iterator[Line]:
    """The lines between two numbers of layers. The sum is convex: a line that is exact at both ends is
    exact."""
    low, high = (_sum_at(lines, count, layers) for layers in (first, last))
    yield from (low, high)
    middle = (first + last) // 2
    if _at(low, last) != _at(high, last) and first < middle:
        yield from _largest(lines, count, first, middle)
        yield from _largest(lines, count, middle, last)


def _sum_at(lines: Iterable[Line], count: int, layers: int) -> Line:
    chosen = sorted(lines, key=lambda line: _at(line, layers), reverse=True)[:count]
    return sum(fixed for fixed, _ in chosen), sum(each for _, each in chosen)


def _at(line: Line, layers: int) -> int:
    fixed, each = line
    return fixed + layers * each


def at_once(plan: Plan, spec: ModelSpec, variants: Sequence[Model]) -> AtOnce | None:
    """How many of the base's `variants` run at once in an engine of this plan; None if it has no slots.
    `spec` is the base as the engine holds it."""
    if not plan.max_variants:
        return None
    known = [(variant.name, variant.variant_spec) for variant in variants if variant.variant_spec]
    lines = {name: rank_line(v, spec, plan.tensor_parallel) for name, v in known}
    stages = range(plan.pipeline_parallel)
    room = {stage: arena_bytes(spec, plan, stage) for stage in stages}
    too_large = tuple(
        name
        for name, line in lines.items()
        if any(_at(line, plan.layers_per_stage[stage]) > room[stage] for stage in stages)
    )
    fitting = [line for name, line in lines.items() if name not in too_large]
    counts = (_fit_at(fitting, plan.layers_per_stage[stage], room[stage]) for stage in stages)
    return AtOnce(len(known), min(plan.max_variants, *counts), too_large)


def at_once_in(
    placement: Placement | None, base: Model, variants: Sequence[Model], settings: Settings
) -> AtOnce | None:
    """As `at_once`, for a placement of the base; None before there is one."""
    if placement is None or base.spec is None:
        return None
    spec = served_spec(base.spec, engine_dtype(settings, placement.ranks[0].device_kind))
    return at_once(placement.plan, spec, variants)


def _fit_at(lines: Sequence[Line], layers: int, room: int) -> int:
    """How many of the largest variants fit together."""
    for count, line in enumerate(sorted((_at(line, layers) for line in lines), reverse=True)):
        room -= line
        if room < 0:
            return count
    return len(lines)


def rank_line(variant: VariantSpec, base: ModelSpec, tp: int) -> Line:
    """The line of a variant on each of `tp` ranks."""
    if variant.kind is VariantKind.LORA:
        return 0, _lora_layer(base, {name: facts.rank for name, facts in variant.modules.items()}, tp)
    demand = variant_demand(variant, base)
    sharded, whole = uncoded_bytes(variant, base, tp)
    layer = -(-(demand.sharded + sharded) // (base.num_layers * tp))
    layer -= -(demand.whole + whole) // base.num_layers
    return int(PACKING * demand.full), int(PACKING * layer)


def lora_line(base: ModelSpec, rank: int, tp: int) -> Line:
    """The line of a LoRA adapter of this rank on all adaptable modules."""
    return 0, _lora_layer(base, dict.fromkeys(base.linear_shapes, rank), tp)


def _lora_layer(base: ModelSpec, ranks: Mapping[str, int], tp: int) -> int:
    """A layer's bytes. A is (rank, in), B is (out, rank); column-parallel layers shard B, row-parallel ones
    A."""
    linears = adaptable_linears(base)
    shards = ((rank, linears[name].shard(tp, base.heads)) for name, rank in ranks.items())
    return sum(
        -(-rank * size * base.dtype_bytes // ALIGNMENT) * ALIGNMENT
        for rank, shard in shards
        for size in shard
    )


def variant_demand(variant: VariantSpec, base: ModelSpec) -> Demand:
    """The bytes of a variant other than LoRA; as stored if an older record does not have the engine's
    bytes."""
    held = variant.held
    if held is None:
        return Demand(variant.weight_bytes - variant.full_bytes, 0, variant.full_bytes)
    full = base.dtype_bytes * held.full_values + held.embedding_bytes + held.head_bytes
    whole = base.dtype_bytes * held.layer_values + held.whole_bytes
    return Demand(held.layer_bytes - held.whole_bytes, whole, full - _staying_bytes(variant, held, base))


def _staying_bytes(spec: VariantSpec, held: HeldBytes, base: ModelSpec) -> int:
    """The bytes of an embedding that stays in host memory, because it is not also the variant's head."""
    if not spec.replaces_embedding or (base.tied and not spec.replaces_head):
        return 0
    whole = base.dtype_bytes * math.prod(base.other_shapes.get(EMBEDDING, (0,)))
    return held.embedding_bytes or whole
