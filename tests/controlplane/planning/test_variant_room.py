"""Memory for the variants of a base, against every set of them: 1,000 random bases with variants of 10 MB to
3 GB."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane import errors
from controlplane.planning.placement_decision import decide
from controlplane.planning.variant_room import (
    PACKING,
    AtOnce,
    Line,
    at_once,
    largest,
    rooms,
    with_room_for_variants,
)
from controlplane.settings import Settings
from controlplane.state.records import Deployment, Model, Phase
from placement.types import Device, EngineSizes, Intent, Inventory, Placement
from profiler.plans import even_stages
from profiler.roofline import MOVED_AT_ONCE_BYTES, variant_bytes
from profiler.shards import tp_fits
from profiler.types import DeviceRates, ModelSpec, Plan
from profiler.variants.types import HeldBytes, ModuleFacts, VariantKind, VariantSpec
from testkit.known_models import llama

MB, GIB = 10**6, 1 << 30
BASES = (
    llama(32, 4096, 32, 32, 11008, 32000, 2, tied=False),
    llama(32, 4096, 32, 8, 14336, 128256, 2, tied=False),
    llama(40, 5120, 40, 8, 13824, 32000, 2, tied=False),
)
LORA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def variant(number: int, spec: VariantSpec) -> Model:
    return Model(f"v{number}", number, Phase.READY, base="b", adapter="a", variant_spec=spec)


def random_variant(rng: random.Random, base: ModelSpec) -> VariantSpec:
    """Variants of 10 MB to 3 GB: LoRA adapters; deltas with parts that TP shards, parts that it does not, and
    tensors that replace the base's."""
    size = round(10 * MB * 300 ** rng.random())
    if rng.random() < 0.4:
        modules = rng.sample(sorted(LORA), rng.randint(1, len(LORA)))
        rank = min(512, max(1, size // (base.num_layers * sum(map(sum, base.linear_shapes.values())) * 2)))
        return VariantSpec(VariantKind.LORA, size, {m: ModuleFacts(size // 7, rank) for m in modules})
    full = round(size * rng.choice((0, 0.1, 0.5)))
    whole = round((size - full) * rng.choice((0, 0, 0.4)))
    held = HeldBytes(full // 2, 0, size - full, whole_bytes=whole)
    return VariantSpec(VariantKind.SPARSE_DELTA, size, {}, full_bytes=full, held=held)


def bytes_of(spec: VariantSpec, base: ModelSpec, tp: int, layers: int) -> float:
    """The bytes of a variant on a rank with N of the base's layers."""
    if spec.kind is VariantKind.LORA:
        each = 0
        for name, facts in spec.modules.items():
            out, into = base.linear_shapes[name]
            if name in ("o_proj", "down_proj"):
                into //= tp
            elif name in ("k_proj", "v_proj"):
                out = base.head_dim * max(1, base.num_kv_heads // tp)
            else:
                out //= tp
            each += 2 * facts.rank * (out + into)
        return layers * each
    assert spec.held is not None
    held = spec.held
    sharded, share = held.layer_bytes - held.whole_bytes, layers / base.num_layers
    return 2 * held.full_values + share * (sharded / tp + held.whole_bytes)


def most(sizes: Sequence[float], count: int) -> float:
    return max((sum(each) for each in itertools.combinations(sizes, min(count, len(sizes)))), default=0.0)


@pytest.mark.parametrize("seed", range(4))
def test_room_is_what_the_registered_variants_need_together(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        base, slots = rng.choice(BASES), rng.randint(1, 6)
        sizes_of_engine = EngineSizes(variant_slots=slots, lora_rank=rng.choice((8, 64)))
        specs = [random_variant(rng, base) for _ in range(rng.randint(0, 7))]
        models = [variant(number, spec) for number, spec in enumerate(specs, 1)]
        tp, pp = rng.choice([tp for tp in (1, 2, 4, 8) if tp_fits(base, tp)]), rng.choice((1, 2, 3))
        bare = Plan(tp, even_stages(base.num_layers, pp), "none", 2048, 4096, 0, 0)
        every = rooms(models, base, sizes_of_engine)
        plans = [with_room_for_variants(bare, base, sizes_of_engine, models, room) for room in every]
        assert plans[0] == with_room_for_variants(bare, base, sizes_of_engine, models)
        spare = VariantSpec(
            VariantKind.LORA, 0, dict.fromkeys(LORA, ModuleFacts(0, sizes_of_engine.lora_rank or 0))
        )
        for stage, layers in enumerate(bare.layers_per_stage):
            sizes = [bytes_of(spec, base, tp, layers) for spec in specs]
            spares = [bytes_of(spare, base, tp, layers)] * slots
            room = [variant_bytes(base, plan, stage) - MOVED_AT_ONCE_BYTES for plan in plans]
            # Any variants in all slots fit, those registered later too if they are LoRAs; and little is lost.
            assert most(sizes + spares, slots) <= room[0] <= PACKING * most(sizes + spares, slots) + MB
            assert room == sorted(room, reverse=True)
            assert room[-1] >= max([*sizes, spares[0]])
        for plan in plans:
            told = at_once(plan, base, models)
            assert told is not None
            check_count(told, plan, base, specs, slots)
        if specs:
            assert at_once(plans[0], base, models) == AtOnce(len(specs), min(slots, len(specs)))


def check_count(told: AtOnce, plan: Plan, base: ModelSpec, specs: Sequence[VariantSpec], slots: int) -> None:
    """Any `count` of the variants fit on every rank, and on some ranks one more would not."""
    fits, fits_more = True, True
    for stage, layers in enumerate(plan.layers_per_stage):
        sizes = [bytes_of(spec, base, plan.tensor_parallel, layers) for spec in specs]
        room = variant_bytes(base, plan, stage) - MOVED_AT_ONCE_BYTES
        fits = fits and most(sizes, told.count) <= room
        fits_more = fits_more and PACKING * most(sizes, told.count + 1) + MB <= room
    assert (told.registered, told.too_large) == (len(specs), ())
    assert fits
    assert not fits_more or told.count == min(slots, len(specs))


def sums(lines: Iterable[Line], layers: int) -> int:
    return sum(fixed + layers * each for fixed, each in lines)


def test_the_largest_sum_is_found_for_any_number_of_layers() -> None:
    rng = random.Random(5)
    for _ in range(300):
        lines = [(rng.randrange(0, 50), rng.randrange(0, 10)) for _ in range(rng.randint(1, 6))]
        count, layers = rng.randint(1, 7), rng.randint(1, 12)
        found = largest(lines, count, layers)
        for n in range(1, layers + 1):
            sets = itertools.combinations(lines, min(count, len(lines)))
            assert max(fixed + n * each for fixed, each in found) == max(sums(each, n) for each in sets)


# --- by a decision --------------------------------------------------------------------------------------

BASE = replace(BASES[0], fingerprint="f")
FOUR = [
    variant(1, VariantSpec(VariantKind.LORA, 0, {m: ModuleFacts(0, 16) for m in ("q_proj", "v_proj")})),
    variant(2, VariantSpec(VariantKind.LORA, 0, dict.fromkeys(LORA, ModuleFacts(0, 64)))),
    variant(3, VariantSpec(VariantKind.SPARSE_DELTA, 0, {}, held=HeldBytes(0, 0, 1890 * MB))),
    variant(4, VariantSpec(VariantKind.SPARSE_DELTA, 0, {}, held=HeldBytes(0, 0, 1130 * MB))),
]
SETTINGS = Settings(home=Path("/nowhere"))
SIZES = EngineSizes(1024, 4, variant_slots=4, lora_rank=64, merged_slot=False)


def placed(free_bytes: int, variants: Sequence[Model] = FOUR) -> Placement:
    device = Device("n", 0, "h200", 141 * GIB, free_bytes, DeviceRates(4e12, 5e14), "h200")
    model = Model("b", 9, Phase.READY, source="/b", path="/b", compression={"none": 100.0}, spec=BASE)
    deployment = Deployment("b", 9, "b", Phase.PENDING, Intent.MIN_LATENCY, 16, engine=SIZES)
    return decide(model, deployment, Inventory((device,)), SETTINGS, variants)


def test_four_variants_in_four_slots_are_planned_for_together() -> None:
    """Where the larger of LoRA slots and deltas was planned for, two of them were on the device."""
    placement = placed(140 * GIB)
    assert at_once(placement.plan, BASE, FOUR) == AtOnce(4, 4)
    room = variant_bytes(BASE, placement.plan, 0)
    assert room >= sum(bytes_of(v.variant_spec, BASE, 1, 32) for v in FOUR if v.variant_spec)


def test_scarce_memory_lowers_the_variant_limit_and_the_base_is_placed() -> None:
    """As many variants as fit; it is refused only without room for one of each kind."""
    needed = placed(140 * GIB).ranks[0].memory_bytes
    counts = []
    for less in (0, 1, 50, 200, 400, 600, 1200, 1500):
        placement = placed(needed - less * MB)
        assert placement.ranks[0].memory_bytes <= needed - less * MB
        told = at_once(placement.plan, BASE, FOUR)
        assert told is not None
        counts.append(told.count)
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == {4, 3, 2, 1}
    with pytest.raises(errors.NoFeasiblePlan, match="memory"):
        placed(needed - 4000 * MB)


def test_variants_that_were_registered_later_are_counted_in_the_memory_there_is() -> None:
    placement = placed(140 * GIB, FOUR[:2])
    assert at_once(placement.plan, BASE, FOUR[:2]) == AtOnce(2, 2)
    assert at_once(placement.plan, BASE, FOUR[:3]) == AtOnce(3, 2, ("v3",))
    late = variant(5, VariantSpec(VariantKind.SPARSE_DELTA, 0, {}, held=HeldBytes(0, 0, 600 * MB)))
    assert at_once(placement.plan, BASE, [*FOUR[:2], late]) == AtOnce(3, 3)
    many = [replace(late, name=f"late-{number}") for number in range(3)]
    assert at_once(placement.plan, BASE, many) == AtOnce(3, 2)


def test_a_plan_of_an_older_record_keeps_its_meaning() -> None:
    """LoRA adapters in all slots, or the deltas, whichever is more."""
    old = Plan(1, (32,), "none", 2048, 4096, 4, 64, delta_bytes=3000 * MB)
    assert variant_bytes(BASE, old, 0) == pytest.approx(3000 * MB, rel=1e-6)
    assert at_once(old, BASE, FOUR[2:]) == AtOnce(2, 1)
    assert at_once(replace(old, delta_bytes=int(PACKING * 3020 * MB) + 64), BASE, FOUR[2:]) == AtOnce(2, 2)
    assert at_once(replace(old, max_variants=0), BASE, FOUR) is None


def test_the_room_is_computed_for_a_rank_among_many() -> None:
    """A delta that TP shards leaves room where one that each rank holds whole does not."""
    whole = VariantSpec(VariantKind.BOFT, 0, {}, held=HeldBytes(0, 945 * MB, 0))
    plan = with_room_for_variants(Plan(4, (16, 16), "none", 2048, 4096, 0, 0), BASE, SIZES, FOUR)
    assert at_once(plan, BASE, FOUR) == AtOnce(4, 4)
    told = at_once(plan, BASE, [*FOUR[:2], variant(3, whole), FOUR[3]])
    assert told == AtOnce(4, 3, ("v3",))
