"""A profile's measurements, for each budget, and the key that it is kept under."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measurements import Point
from profiler.profile_key import profile_key
from profiler.profiling_plan import Reach, needed_bytes, profiling_plan
from testkit.known_models import LLAMA_7B

GIB = 1 << 30
CPU = Reach(True, 1, 64 * GIB, 2048, 16, 2048)
GPUS = Reach(False, 4, 100 * GIB, 2048, 64, 8192)


def test_a_cpu_starts_one_engine() -> None:
    (run,) = profiling_plan(LLAMA_7B, CPU)
    assert run.setting.layers_per_stage == (32,)
    assert (run.setting.tensor_parallel, run.setting.batched_tokens) == (1, 2048)
    assert run.distinct_layers == 2  # of 405 MB each


def test_gpus_measure_each_tp_one_in_two_depths_and_a_pipeline() -> None:
    found = [
        (t.setting.tensor_parallel, t.setting.layers_per_stage)
        for t in profiling_plan(LLAMA_7B, GPUS)
        if not t.variants
    ]
    assert found == [(1, (32,)), (1, (16,)), (2, (32,)), (4, (32,)), (1, (16, 16))]


def test_gpus_measure_each_kind_of_variant_in_an_engine_that_is_started_for_it() -> None:
    runs = [run for run in profiling_plan(LLAMA_7B, replace(GPUS, max_variants=6)) if run.variants]
    assert [run.setting.launched for run in runs] == [
        ("lora",),
        ("lora", "sparse_delta"),
        ("lora", "boft"),
        ("lora", "boft", "sparse_delta"),
    ]
    assert {run.slots for run in runs} == {6}
    lora, *others, _all_kinds = runs
    for run in others:  # a LoRA there shows what kernels take that find nothing to do
        assert {one.kind for one in run.variants} == set(run.setting.launched)
        assert set(lora.points) & set(run.points)


def test_variants_are_asked_by_few_requests_and_by_as_many_as_an_engine_runs() -> None:
    """One of a kind and as many as there are slots; of kinds that serve together also both; with prompts that
    take several steps. Each load is also measured without."""
    runs = profiling_plan(LLAMA_7B, replace(GPUS, max_variants=6))
    alone = {(run.setting.layers, point) for run in runs if not run.variants for point in run.points}
    for run in runs:
        for point in run.points:
            if point.mix:
                assert (run.setting.layers, Point(point.batch, point.input_tokens)) in alone
    for run in (run for run in runs if run.variants):
        kinds = set(run.setting.launched) if len(run.setting.launched) != 2 else {run.setting.launched[1]}
        asked = [p for p in run.points if {one.kind for one in p.mix} == kinds]
        assert {8, 32, 64} <= {p.batch for p in asked}
        assert {128, 1024} <= {p.input_tokens for p in asked}
        if len(kinds) == 1:
            assert {1, 6} <= {len(set(p.mix)) for p in asked if p.batch == 64}
        if len(run.setting.launched) > 1:
            assert any({one.kind for one in p.mix} == set(run.setting.launched) for p in run.points)


def test_scarce_memory_allows_fewer_loads_of_a_kind() -> None:
    def loads(gib: float) -> dict[tuple[str, ...], int]:
        reach = replace(GPUS, batched_tokens=2048, device_bytes=int(gib * GIB), max_variants=8)
        return {r.setting.launched: len(r.points) for r in profiling_plan(LLAMA_7B, reach) if r.variants}

    roomy, narrow = loads(20), loads(5.3)
    assert 4 < narrow["lora", "sparse_delta"] < roomy["lora", "sparse_delta"]
    assert narrow["lora",] == roomy["lora",]


def test_a_cpu_launches_what_a_batch_needs_and_so_needs_one_engine() -> None:
    (run,) = profiling_plan(LLAMA_7B, CPU)
    assert run.setting.launched == ()
    assert {one.kind for one in run.variants} == {"lora", "sparse_delta", "boft"}


def test_tp_is_spared_the_largest_load_where_others_tell_of_its_batch_and_its_length() -> None:
    one, half, two, four, pipeline, *_mixed = (set(run.points) for run in profiling_plan(LLAMA_7B, GPUS))
    assert one - two == one - four == one - half == {Point(64, 1024)}
    assert one == pipeline
    short, single = replace(GPUS, max_model_len=128), replace(GPUS, max_sequences=1)
    for reach in (short, single):
        one, half, two, *_ = (set(run.points) for run in profiling_plan(LLAMA_7B, reach))
        assert one == half == two


@given(
    st.integers(1, 4),
    st.integers(1, 200),
    st.sampled_from([16, 100, 4096]),
    st.integers(1, 64),
    st.booleans(),
)
def test_everything_fits_the_budget_and_the_engines(
    devices: int, gib: int, length: int, sequences: int, on_cpu: bool
) -> None:
    reach = Reach(on_cpu, devices, gib * GIB, length, sequences, 2048)
    if gib < 8:
        with contextlib.suppress(ValueError):
            profiling_plan(LLAMA_7B, reach)
        return
    engine_runs = profiling_plan(LLAMA_7B, reach)
    assert engine_runs
    for run in engine_runs:
        assert needed_bytes(LLAMA_7B, run, reach) <= reach.device_bytes
        assert run.setting.world_size <= (1 if on_cpu else devices)
        assert len(set(run.points)) == len(run.points)
        for point in run.points:
            assert point.batch <= sequences
            assert point.input_tokens + run.output_tokens <= length


def test_a_budget_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match=r"measuring needs \d+ MiB on one device, but may use only 1024 MiB"):
        profiling_plan(LLAMA_7B, replace(CPU, device_bytes=GIB))


def test_small_layers_are_held_until_no_cache_holds_them() -> None:
    small = replace(LLAMA_7B, linears={}, linear_shapes={}, layer_weight_bytes=64 << 20)
    (run,) = profiling_plan(small, CPU)
    assert run.distinct_layers == 8


def test_keys_can_name_files() -> None:
    key = profile_key(LLAMA_7B, "float32", "AMD EPYC (tm) 7/B @ 2x", "0.32.0")
    assert set(key.text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert key.text.endswith("_float32_AMD-EPYC-tm-7-B-2x_0.32.0_r4")
    assert profile_key(LLAMA_7B, "float32", "", "").text.endswith("_unknown_unknown_r4")


@pytest.mark.parametrize(
    "field", ["num_layers", "hidden_size", "num_kv_heads", "vocab_size", "sliding_window"]
)
def test_another_shape_is_another_key(field: str) -> None:
    other = replace(LLAMA_7B, **{field: 3})  # type: ignore[arg-type]
    assert profile_key(other, "a", "b", "c") != profile_key(LLAMA_7B, "a", "b", "c")


@pytest.mark.parametrize("field", ["fingerprint", "max_position"])
def test_other_weights_are_not(field: str) -> None:
    other = replace(LLAMA_7B, **{field: "x" if field == "fingerprint" else 77})  # type: ignore[arg-type]
    assert profile_key(other, "a", "b", "c") == profile_key(LLAMA_7B, "a", "b", "c")
