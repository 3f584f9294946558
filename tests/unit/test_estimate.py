"""The estimate against closed forms, against measured H200 figures, and for the order of things."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.plans import candidate_plans, even_stages, no_quantization_reason, quantization_names
from profiler.quantization import accuracy_of
from profiler.roofline import allowance_bytes, estimate, tp_fits
from profiler.types import DeviceRates, Estimate, ModelSpec, Plan, Workload
from testkit.known_models import LLAMA_7B, RATES, SMOLLM2, plan


def run(
    spec: ModelSpec = SMOLLM2, p: Plan | None = None, load: Workload | None = None, rates: DeviceRates = RATES
) -> Estimate:
    p = p or plan(spec)
    return estimate(spec, p, [rates] * p.world_size, load or Workload(1, 128, 64), 1.0)


def weights_and_caches(spec: ModelSpec, p: Plan) -> list[int]:
    """Memory without the working allowance, by rank."""
    made = run(spec, p).memory_bytes
    return [made[r] - allowance_bytes(spec, p, r // p.tensor_parallel) for r in range(p.world_size)]


def test_smollm2_weighs_what_its_parameters_do() -> None:
    assert SMOLLM2.weight_bytes == 4 * 134_515_008
    assert weights_and_caches(SMOLLM2, plan()) == [4 * 134_515_008]


def test_kv_cache_and_lora_slots_in_bytes() -> None:
    bare = weights_and_caches(SMOLLM2, plan())[0]
    cached = weights_and_caches(SMOLLM2, plan(kv_cache_tokens=1000))[0]
    assert cached - bare == 1000 * 30 * 2 * 3 * 64 * 4
    slotted = weights_and_caches(SMOLLM2, plan(max_variants=3, max_lora_rank=16))[0]
    widths = (576 + 576) * 2 + (192 + 576) * 2 + (1536 + 576) * 3  # (out + in) of q, o, k, v, gate, up, down
    assert slotted - bare == 30 * 3 * 16 * widths * 4


def test_tensor_parallel_shards_all_but_the_norms() -> None:
    """SmolLM2 splits three ways: 3 heads and 1 KV head each."""
    norms = (30 * 2 + 1) * 576
    each = (134_515_008 - norms) // 3 + norms
    assert weights_and_caches(SMOLLM2, plan(tp=3)) == [4 * each] * 3
    assert weights_and_caches(SMOLLM2, plan(tp=3, kv_cache_tokens=10))[0] - 4 * each == 10 * 30 * 2 * 64 * 4


def test_a_sharded_slot_keeps_the_unsharded_side_whole() -> None:
    slotted = weights_and_caches(SMOLLM2, plan(tp=3, max_variants=1, max_lora_rank=8))[0]
    widths = (192 + 576) + (64 + 576) * 2 + (576 + 192) + (512 + 576) * 2 + (576 + 512)
    assert slotted - weights_and_caches(SMOLLM2, plan(tp=3))[0] == 30 * 8 * widths * 4


def test_a_pipeline_holds_the_tied_table_twice_and_an_untied_one_once() -> None:
    table = 49152 * 576 * 4
    assert sum(weights_and_caches(SMOLLM2, plan(pp=2))) == SMOLLM2.weight_bytes + table
    untied = replace(SMOLLM2, other_weight_bytes=SMOLLM2.other_weight_bytes + table)
    assert sum(weights_and_caches(untied, plan(pp=2))) == untied.weight_bytes
    first, middle, last = weights_and_caches(untied, plan(pp=3))
    assert (first - middle, last - middle) == (table, table + 576 * 4)


def test_decoding_alone_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    """At batch 1: TPOT = (weights + mean KV) / bandwidth; TTFT = layers' FLOPs / rate + reading the head."""
    made = run(load=Workload(1, 512, 64))
    embedding_norm = 576 * 4  # the final norm is too small to be counted as moved
    moved = 4 * 134_515_008 - embedding_norm + (512 + 32) * 30 * 2 * 3 * 64 * 4
    assert made.tpot_s == pytest.approx(moved / 20e9)
    linear = 30 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    flops = 2 * 512 * linear + 30 * 4 * 9 * 64 * 512 * 513 / 2
    assert made.ttft_s == pytest.approx(flops / 100e9 + 4 * 49152 * 576 / 20e9)


@pytest.mark.parametrize(
    ("tp", "pp", "batch", "measured_ms"),
    [(1, 1, 1, 4.61), (1, 1, 32, 7.20), (1, 1, 128, 15.68), (2, 1, 1, 3.23), (2, 1, 32, 4.72),
     (2, 1, 128, 9.34), (1, 2, 1, 4.72), (1, 2, 32, 7.79)],
)  # fmt: skip
def test_llama_2_7b_on_h200s(tp: int, pp: int, batch: int, measured_ms: float) -> None:
    """Our own runs (Llama-2-7B shapes, bf16, 512 input tokens), within 12%.

    The sustained bandwidth is the first row's (13.3 GB in 4.61 ms) and the communication constants were
    fitted to the TP rows and the first PP row; batches 32 and 128 on one GPU and 32 on two stages are
    predictions. PP=2 at batch 128 (11.07 ms) is left out: overlap is not modelled, the estimate is higher.
    """
    h200 = DeviceRates(13.3e9 / 4.61e-3, 400e12)
    made = run(LLAMA_7B, plan(LLAMA_7B, tp, pp), Workload(batch, 512, 16), h200)
    assert made.tpot_s * 1e3 == pytest.approx(measured_ms, rel=0.12)


LOAD = st.builds(Workload, st.integers(1, 64), st.integers(1, 512), st.integers(1, 512))
SLOTS = st.fixed_dictionaries(
    {
        "kv_cache_tokens": st.integers(0, 10**6),
        "max_variants": st.integers(0, 32),
        "max_lora_rank": st.integers(0, 64),
    }
)


def total(made: Estimate) -> tuple[float, float, int]:
    return made.ttft_s, made.tpot_s, sum(made.memory_bytes)


@given(
    layers=st.integers(2, 60), load=LOAD, slots=SLOTS, split=st.sampled_from([(1, 1), (3, 1), (1, 2), (3, 2)])
)
def test_more_of_anything_never_costs_less(
    layers: int, load: Workload, slots: dict[str, int], split: tuple[int, int]
) -> None:
    spec = replace(SMOLLM2, num_layers=layers)
    p = plan(spec, *split, **slots)
    base = run(spec, p, load)
    assert base == run(spec, p, load)
    deeper = replace(SMOLLM2, num_layers=layers + 1)
    grown = run(deeper, plan(deeper, *split, **slots), load)
    assert all(a < b for a, b in zip(total(base), total(grown), strict=True))
    for key, value in slots.items():
        changes: dict[str, Any] = {key: value + 1}
        more = run(spec, replace(p, **changes), load)
        assert all(a <= b for a, b in zip(total(base), total(more), strict=True))
    for key in ("batch", "input_tokens", "output_tokens"):
        heavier = run(spec, p, replace(load, **{key: getattr(load, key) + 1}))
        assert all(a <= b for a, b in zip(total(base), total(heavier), strict=True))
    faster = run(spec, p, load, DeviceRates(2 * RATES.memory_bytes_per_s, 2 * RATES.flops_per_s))
    assert faster.ttft_s < base.ttft_s
    assert faster.tpot_s < base.tpot_s


def test_the_slowest_rank_of_a_stage_sets_its_pace() -> None:
    slow = replace(RATES, memory_bytes_per_s=10e9)
    load = Workload(1, 8, 8)
    mixed = estimate(SMOLLM2, plan(tp=3), [RATES, slow, RATES], load, 1.0)
    assert mixed == estimate(SMOLLM2, plan(tp=3), [slow] * 3, load, 1.0)


@pytest.mark.parametrize(
    ("p", "ranks", "words"),
    [
        (plan(), 2, "rates"),
        (plan(tp=2), 2, "cannot be split"),
        (replace(plan(), layers_per_stage=(29,)), 1, "30 layers"),
        (replace(plan(), layers_per_stage=(30, 0)), 2, "30 layers"),
        (replace(plan(), quantization="int8"), 1, "int8"),
    ],
)
def test_mismatched_plans_and_specs_are_refused(p: Plan, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        estimate(SMOLLM2, p, [RATES] * ranks, Workload(1, 1, 1), 1.0)


def test_candidate_plans_are_those_the_engine_can_launch() -> None:
    splits = {
        (p.tensor_parallel, p.layers_per_stage)
        for p in candidate_plans(SMOLLM2, ("none",), 4, 2048, 8, 4, 16)
    }
    assert splits == {(1, (30,)), (1, (15, 15)), (1, (10, 10, 10)), (1, (7, 8, 8, 7)), (3, (30,))}
    assert {tp for tp in range(1, 33) if tp_fits(LLAMA_7B, tp)} == {1, 2, 4, 8, 16, 32}
    grouped = replace(
        LLAMA_7B, num_kv_heads=8, linear_shapes={**LLAMA_7B.linear_shapes, "gate_proj": (14336, 4096)}
    )
    assert {tp for tp in range(1, 33) if tp_fits(grouped, tp)} == {1, 2, 4, 8, 16, 32}
    every = candidate_plans(LLAMA_7B, ("none",), 8, 1024, 3, 0, 0)
    assert all(p.kv_cache_tokens == 3072 and sum(p.layers_per_stage) == 32 for p in every)
    assert every == tuple(sorted(every, key=lambda p: (p.world_size, p.tensor_parallel)))


def test_compression_that_cannot_be_served_yields_no_plan_and_a_reason() -> None:
    assert quantization_names({"int8": 0.9}, SMOLLM2) == ()
    assert "int8" in no_quantization_reason({"int8": 0.9}, SMOLLM2)
    assert accuracy_of({"fp16": 45.3, "int8": 44.0}) == 45.3
    assert accuracy_of({}) == 1.0
    with pytest.raises(ValueError, match="positions"):
        candidate_plans(SMOLLM2, ("none",), 1, 4097, 1, 0, 0)


@given(layers=st.integers(1, 100), stages=st.integers(1, 100))
def test_even_stages_are_even(layers: int, stages: int) -> None:
    stages = min(layers, stages)
    split = even_stages(layers, stages)
    assert (sum(split), len(split)) == (layers, stages)
    assert max(split) - min(split) <= 1
    assert split[-1] == min(split)
