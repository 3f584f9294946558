"""Predictions of plans under loads: against an engine simulated event by event, sums by hand, nonsense."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.errors import PlanError
from profiler.measurements import Point, Setting
from profiler.physical.calibration import Cut
from profiler.physical.variants import decode_time, variant_load
from profiler.plans import even_stages
from profiler.predicting.predict import Ground, Prediction, predict, predict_all
from profiler.roofline import estimate, merged_slot_bytes, variant_bytes
from profiler.types import Basis, Interval, Plan, Workload
from profiler.variants.types import ModuleFacts, VariantKind, VariantSpec
from testkit.engine_simulator import ClientSees, measured, simulate
from testkit.known_models import LLAMA_7B
from testkit.simulated_profile import BUDGET, CALIBRATION, MACHINE, MIB, OUT, RATES, ground, plan


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layers", [(32,), (16, 16), (10, 22), (21, 11)], ids=str)
@pytest.mark.parametrize(("batch", "length"), [(1, 300), (32, 500)])
def test_intervals_hold_what_the_simulated_engine_takes(
    tp: int, layers: tuple[int, ...], batch: int, length: int
) -> None:
    p = plan(tp, layers)
    found = predict(ground(p), p, Workload(batch, length, OUT))
    point = Point(batch, length)
    truth = measured(MACHINE, Setting(layers, tp), point, OUT, BUDGET)
    assert found.basis is Basis.PROFILE
    assert found.ttft_s.holds(truth.ttft_s)
    assert found.step_s.holds(truth.tpot_s)
    assert found.tpot_s.holds(ClientSees.of(simulate(MACHINE, layers, tp, point, OUT, BUDGET).tokens).tpot_s)
    assert found.latency_s.holds(truth.latency_s)
    assert found.tokens_per_s.holds(batch * OUT / truth.latency_s)
    assert found.tpot_s.high / found.tpot_s.low < 1.4  # certain enough to be of use
    assert ("no pipeline was measured" in " ".join(found.notes)) == (len(layers) > 1)


def test_an_unmeasured_tp_is_scaled_with_a_wider_range_and_marked_so() -> None:
    """The roofline's ratio: four ranks are quicker than two, by less than twice."""
    two, four = (predict(ground(plan(tp)), plan(tp), Workload(8, 256, OUT)) for tp in (2, 4))
    assert 0.5 < four.tpot_s.value / two.tpot_s.value < 1
    assert "TP=4 was not measured; scaled from TP=2" in four.notes
    assert _width(four.tpot_s) > _width(two.tpot_s)


def _width(interval: Interval) -> float:
    return (interval.high - interval.low) / interval.value


def test_ranks_that_share_a_device_take_what_one_with_all_of_it_does_but_less_surely() -> None:
    whole, split = plan(), plan(2, (16, 16))
    alone = predict(ground(whole), whole, Workload(1, 128, OUT))
    shared = predict(replace(ground(split), shared=4), split, Workload(1, 128, OUT))
    assert shared.tpot_s.value == pytest.approx(alone.tpot_s.value + CALIBRATION.hop_s)
    assert _width(shared.tpot_s) > _width(alone.tpot_s)
    assert any("share a device" in note for note in shared.notes)


def test_larger_loads_than_measured_are_less_certain() -> None:
    inside, beyond = (predict(ground(plan()), plan(), Workload(b, 128, OUT)) for b in (64, 512))
    assert _width(beyond.tpot_s) > 1.5 * _width(inside.tpot_s)


def test_a_prediction_without_a_profile_is_the_roofline_with_a_wide_range() -> None:
    p, load = plan(), Workload(2, 128, OUT)
    found, roof = predict(ground(p, known=False), p, load), estimate(LLAMA_7B, p, [RATES], load, 1.0)
    assert found.basis is Basis.ROUGH
    assert (found.ttft_s.value, found.tpot_s.value) == (roof.ttft_s, roof.tpot_s)
    assert found.tpot_s.high == pytest.approx(9 * found.tpot_s.low)
    assert "no profile" in found.notes[0]


def test_memory_of_each_rank_and_what_is_left() -> None:
    """Llama-2-7B in bfloat16, 10 of 32 layers: 16 KiB of KV a token and layer."""
    p, load = plan(layers=(10, 22)), Workload(4, 100, 28)
    found = predict(ground(p, free=40 << 30), p, load)
    first, last = found.ranks
    assert first.kv_cache == 4 * 128 * 10 * 16384
    assert last.kv_cache == 4 * 128 * 22 * 16384
    # No pipeline was measured: what stages take with their first step is allowed for.
    assert (first.activations, first.runtime) == (300 * MIB, (500 + 1344) * MIB)
    for rank in found.ranks:
        parts = rank.weights + rank.activations + rank.graphs + rank.runtime + rank.variants + rank.kv_cache
        assert rank.total.value == parts
        assert rank.total.low <= parts <= rank.total.high
    left = (40 << 30) - (last.total.value - last.kv_cache)
    assert found.kv_capacity_tokens == left // (22 * 16384)
    assert found.concurrency == found.kv_capacity_tokens // 128
    assert predict(ground(p), p, load).kv_capacity_tokens is None
    assert predict(ground(p, free=1 << 30), p, load).concurrency == 0


def test_slots_for_variants_take_memory() -> None:
    p = plan(max_variants=4, max_lora_rank=16)
    found = predict(ground(p), p, Workload(1, 8, 8))
    assert found.ranks[0].variants == variant_bytes(LLAMA_7B, p, 0) > 0


@pytest.mark.parametrize("known", [True, False])
def test_a_merged_slot_takes_as_much_as_the_weights(known: bool) -> None:
    """6.74 billion parameters of two bytes; and nothing where they are quantised."""
    without, load = plan(1, max_variants=4, max_lora_rank=16), Workload(1, 8, 8)
    with_slot = replace(without, merged_slot=True)
    (few,), (more,) = (predict(ground(p, known), p, load).ranks for p in (without, with_slot))
    assert more.variants - few.variants == pytest.approx(13.5e9, rel=0.01)
    assert more.total.value - few.total.value == more.variants - few.variants
    quantised = replace(with_slot, quantization="fp8")
    assert merged_slot_bytes(LLAMA_7B, quantised, 0) == 0


# --- variants ---------------------------------------------------------------------------------------


def variant(kind: VariantKind = VariantKind.LORA, **facts: int) -> VariantSpec:
    size = facts.pop("size_bytes", 1000)
    return VariantSpec(kind, 32 * size, {"q_proj": ModuleFacts(size, **facts)})


SMALL, LARGE = variant(rank=8), variant(rank=64, size_bytes=8000)


def test_the_load_of_a_mixed_batch() -> None:
    """5 requests in turn: base, small, large, base, small."""
    load = variant_load(LLAMA_7B, [None, SMALL, LARGE], 5)
    assert (load.rows, load.rank_sum, load.rank_max) == (3, 8 + 64 + 8, 64)
    assert load.distinct_bytes == 9000
    assert load.flops == 2 * (8 + 64 + 8) * (4096 + 4096)
    assert load.padded_flops == 2 * 3 * 64 * (4096 + 4096)
    assert variant_load(LLAMA_7B, [SMALL], 8).distinct_bytes == 1000
    assert variant_load(LLAMA_7B, [SMALL, LARGE], 1).rank_max == 8
    assert variant_load(LLAMA_7B, [], 8).rows == variant_load(LLAMA_7B, [None], 8).rows == 0


def test_the_load_of_rotations_and_deltas() -> None:
    boft = variant(VariantKind.BOFT, factors=2, block_size=8)
    load = variant_load(LLAMA_7B, [boft], 3)
    assert load.boft_blocks == 3 * 2 * 4096 // 8
    assert load.flops == 3 * (2 * 2 * 8 * 4096 + 4096)
    sparse = variant_load(LLAMA_7B, [variant(VariantKind.SPARSE_DELTA)], 1)
    assert sparse.flops == 4096 * 4096
    low_rank = variant_load(LLAMA_7B, [variant(VariantKind.SVD_DELTA, rank=16)], 1)
    assert low_rank.flops == 2 * 16 * 8192


def test_variants_cost_time_and_certainty() -> None:
    load = Workload(16, 128, OUT)
    alone = predict(ground(plan()), plan(), load)
    mixed = predict(ground(plan()), plan(), load, [LARGE, SMALL])
    assert mixed.tpot_s.value > alone.tpot_s.value
    assert mixed.ttft_s.value > alone.ttft_s.value
    assert mixed.tpot_s.low == alone.tpot_s.low
    assert _width(mixed.tpot_s) > _width(alone.tpot_s)
    assert any("variants" in note for note in mixed.notes)


def test_reading_a_variant_as_large_as_the_layer_takes_as_long_as_the_layer() -> None:
    spec = LLAMA_7B
    whole = replace(SMALL, modules={"q_proj": ModuleFacts(spec.layer_weight_bytes, rank=1)})
    added = decode_time(CALIBRATION, Cut(1), variant_load(spec, [whole], 1)).added_s
    layer = CALIBRATION.at(Cut(1)).decode.layers_s(1, 1, 0)
    assert added == pytest.approx(layer, rel=0.05)


# --- nonsense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "load", "field", "said"),
    [
        ({"tensor_parallel": 3}, (1, 1, 1), "tensorParallel", "32 heads cannot be split 3 ways"),
        (
            {"tensor_parallel": -1},
            (1, 1, 1),
            "tensorParallel",
            "expected a positive tensor parallelism, got -1",
        ),
        ({"layers_per_stage": (10, 21)}, (1, 1, 1), "layersPerStage", "sum to 32, got 10,21 (sum 31)"),
        ({"layers_per_stage": (33, -1)}, (1, 1, 1), "layersPerStage", "at least one layer"),
        ({"layers_per_stage": ()}, (1, 1, 1), "layersPerStage", "got none"),
        ({"quantization": "int3"}, (1, 1, 1), "quantization", "got 'int3'"),
        ({}, (-4, 1, 1), "batch", "expected batch of 1 to 1000000, got -4"),
        ({}, (1, 0, 1), "inputTokens", "got 0"),
        ({}, (1, 1, 10**9), "outputTokens", "got 1000000000"),
        ({}, (1, 4000, 97), "inputTokens", "at most 4096 tokens of prompt and answer"),
    ],
)
def test_wrong_fields_are_named(
    changes: dict[str, object], load: tuple[int, int, int], field: str, said: str
) -> None:
    p = plan(**changes)  # type: ignore[arg-type]
    for known in (True, False):
        with pytest.raises(PlanError) as refused:
            predict(ground(p, known), p, Workload(*load))
        assert refused.value.field == field
        assert said in str(refused.value)
        assert ";" in str(refused.value)  # what to do


COUNTS = st.integers(-3, 5000) | st.integers()


@given(
    st.integers(-2, 40) | st.integers(),
    st.lists(st.integers(-2, 40), max_size=5) | st.integers(1, 32).map(lambda n: list(even_stages(32, n))),
    st.sampled_from(["none", "fp16", "int4", ""]),
    st.tuples(COUNTS, COUNTS, COUNTS),
    st.booleans(),
)
def test_any_question_is_answered_or_refused(
    tp: int, layers: list[int], quantization: str, load: tuple[int, int, int], known: bool
) -> None:
    p = Plan(tp, tuple(layers), quantization, 4096, 0, 2, 8, batched_tokens=BUDGET)
    rates = (RATES,) * min(1024, max(0, p.world_size))
    try:
        found = predict(Ground(LLAMA_7B, rates, CALIBRATION if known else None), p, Workload(*load))
    except PlanError:
        return
    _is_sound(found)


def _is_sound(found: Prediction) -> None:
    every = (found.ttft_s, found.tpot_s, found.latency_s, found.tokens_per_s, *(r.total for r in found.ranks))
    for interval in every:
        assert 0 < interval.low <= interval.value <= interval.high < math.inf


# --- many plans -------------------------------------------------------------------------------------

SPLITS = st.integers(1, 8).flatmap(
    lambda stages: st.sets(st.integers(1, 31), min_size=stages - 1, max_size=stages - 1)
)


def split(cuts: set[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in itertools.pairwise([0, *sorted(cuts), 32]))


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), SPLITS, st.integers(0, 8)), min_size=1, max_size=6),
    st.builds(Workload, st.integers(1, 300), st.integers(1, 2000), st.integers(1, 500)),
    st.booleans(),
)
def test_many_plans_at_once_cost_what_each_costs_alone(
    made: list[tuple[int, set[int], int]], load: Workload, known: bool
) -> None:
    plans = [plan(tp, split(cuts), max_variants=slots, max_lora_rank=8) for tp, cuts, slots in made]
    alike = Ground(LLAMA_7B, (RATES,), CALIBRATION if known else None, (60 << 30,))
    together = predict_all(alike, plans, load, [None, SMALL])
    for p, found in zip(plans, together, strict=True):
        here = ground(p, known, 60 << 30)
        alone = predict(here, p, load, [None, SMALL])
        for figure in ("ttft_s", "tpot_s", "latency_s", "tokens_per_s"):
            assert _ends(getattr(found, figure)) == pytest.approx(_ends(getattr(alone, figure)), rel=1e-9)
        assert (found.ranks, found.concurrency, found.notes) == (alone.ranks, alone.concurrency, alone.notes)


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"tensor_parallel": 3}, "tensorParallel"), ({"layers_per_stage": (31,)}, "layersPerStage")],
)
def test_one_impossible_plan_among_many_is_named(wrong: dict[str, object], field: str) -> None:
    alike = Ground(LLAMA_7B, (RATES,), CALIBRATION)
    plans = [plan(), plan(**wrong)]  # type: ignore[arg-type]
    with pytest.raises(PlanError) as refused:
        predict_all(alike, plans, Workload(1, 8, 8))
    assert refused.value.field == field


@pytest.mark.slow
def test_ten_thousand_plans_take_a_second() -> None:
    """The time of a prediction with intervals, variants and the memory of every rank; on an idle core about
    half of one."""
    draw = random.Random(0)
    stages = [1 + n % 8 for n in range(10_000)]
    plans = [plan(2 ** (n % 3), split(set(draw.sample(range(1, 32), s - 1)))) for n, s in enumerate(stages)]
    alike = Ground(LLAMA_7B, (RATES,), CALIBRATION, (80 << 30,))
    begin = time.process_time()
    predict_all(alike, plans, Workload(32, 512, OUT), [None, SMALL, LARGE])
    assert time.process_time() - begin < 2.0  # this core may be shared
