"""Step times of batches, against the predictor they were sampled from, and sums by hand; corrections."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.compiled import Records, records
from profiler.measurements import SyntheticVariant
from profiler.physical.calibrating import calibrate
from profiler.predicting.predict import predict
from profiler.step_time import correction, steps
from profiler.step_time.records import BATCH, RANK_CLASSES, STEP_MODEL, VARIANT, rank_class
from profiler.step_time.sampling import add_variants, step_model
from profiler.types import Workload
from profiler.variants.synthetic import synthetic_spec
from testkit.known_models import LLAMA_7B
from testkit.simulated_profile import ground, measurements, plan

PLAN = plan()
GROUND = ground(PLAN)
MODEL = step_model(GROUND, PLAN, max_rows=256, slots=8)


def batch(rows: Records, choices: list[int], context: float) -> Records:
    """[1], a batch of rows that ask these variants."""
    made = records(BATCH, 1)
    for number, variant in enumerate(choices):
        steps.add(made[0], rows[variant], context, variant not in choices[:number])
    return made


BASE = records(VARIANT, 1)
BASE.kind = -1


@pytest.mark.parametrize("rows", [1, 3, 10, 32, 100, 256])
@pytest.mark.parametrize("tokens", [32, 300, 1000])
def test_the_base_takes_the_predicted_time(rows: int, tokens: int) -> None:
    expected = predict(GROUND, PLAN, Workload(rows, tokens, 64)).step_s.value
    made = batch(BASE, [0] * rows, tokens + 32)
    assert steps.decode_step_s(MODEL[0], made[0]) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("tokens", [20, 128, 700, 2048])
def test_a_prompt_alone_takes_the_predicted_time(tokens: int) -> None:
    expected = predict(GROUND, PLAN, Workload(1, tokens, 2)).ttft_s.value
    assert steps.prefill_curve_s(MODEL[0], float(tokens)) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("rank", "rows"), [(8, 1), (64, 1), (16, 8), (64, 32)])
def test_a_mix_of_adapters_takes_the_predicted_time(rank: int, rows: int) -> None:
    specs = [synthetic_spec(LLAMA_7B, SyntheticVariant("lora", rank=r)) for r in (rank, 2 * rank)]
    model = MODEL.copy().view(np.recarray)
    variants = add_variants(model, GROUND, PLAN, specs, 10e9)
    mix = [None, *specs]
    expected = predict(GROUND, PLAN, Workload(rows, 100, 20), mix).step_s.value
    made = batch(variants, [i % 3 for i in range(rows)], 110)
    assert steps.decode_step_s(model[0], made[0]) == pytest.approx(expected, rel=0.03)


def test_a_variant_without_a_profile_is_read_once_a_step() -> None:
    spec = synthetic_spec(LLAMA_7B, SyntheticVariant("lora", rank=16))
    rough = ground(PLAN, known=False)
    variants = add_variants(MODEL.copy().view(np.recarray), rough, PLAN, [spec], 10e9)
    assert variants[1].variant_s == pytest.approx(spec.weight_bytes / rough.rates[0].memory_bytes_per_s)
    assert variants[1].load_s == pytest.approx(spec.weight_bytes / 10e9)


def padded(alpha: float) -> Records:
    """CaraServe's model of a kernel that pads (section 5): alpha rows max(rank) + beta."""
    model = records(STEP_MODEL, 1)
    model.decode_s, model.padded_s = 0.0318, alpha
    model.prefill_grain = 1.0
    return model


@pytest.mark.parametrize(("rows", "rank", "expected_ms"), [(24, 32, 34.8), (16, 64, 35.8), (25, 64, 38.0)])
def test_the_paper_s_toy_example_is_reproduced(rows: int, rank: int, expected_ms: float) -> None:
    """CaraServe, figure 5: 24 rows of rank 32 take 34.8 ms, 16 of rank 64 35.8; one more of rank 64 with the
    24 makes all 25 count as 64."""
    ranks = [rank] * rows if rows != 25 else [32] * 24 + [64]
    variants = records(VARIANT, len(ranks))
    variants.rank, variants.rank_class = ranks, [rank_class(r) for r in ranks]
    made = batch(variants, list(range(len(ranks))), 0.0)
    assert 1e3 * steps.decode_step_s(padded(3.9e-6)[0], made[0]) == pytest.approx(expected_ms, abs=0.06)


@st.composite
def choices(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, 5), min_size=1, max_size=40))


def some_variants() -> Records:
    made = records(VARIANT, 6)
    made.kind = [-1, 0, 0, 1, 2, 3]
    made.rank = [0, 8, 100, 0, 0, 32]
    made.rank_class = [rank_class(r) for r in made.rank]
    made.row_s = [0, 1e-5, 9e-5, 4e-5, 2e-5, 3e-5]
    made.variant_s = [0, 1e-4, 3e-4, 2e-4, 9e-4, 5e-4]
    made.wide_variant_s = [0, 4e-4, 5e-4, 1e-3, 5e-3, 2e-3]
    return made


def by_hand(chosen: list[int], context: float) -> float:
    """The formula of `profiler.step_time.records`, written out."""
    variants = some_variants()
    seconds = 0.01 + 1e-4 * len(chosen) + 1e-8 * context * len(chosen)
    seconds += sum(variants.row_s[v] for v in chosen) + sum(variants.variant_s[v] for v in set(chosen))
    kinds = {variants.kind[v] for v in chosen} - {-1}
    seconds += 1e-3 * len(kinds) + (2e-3 if kinds else 0.0)
    ranked = [variants.rank[v] for v in chosen if variants.rank[v]]
    widest = min(size for size in RANK_CLASSES if size >= max(ranked, default=0))
    return float(seconds + 1e-7 * len(ranked) * widest)


def linear_model() -> Records:
    model = records(STEP_MODEL, 1)
    model.decode_s = 0.01 + 1e-4 * np.arange(model.decode_s.shape[1])
    model.context_s, model.padded_s, model.launch_s, model.any_s = 1e-8, 1e-7, 1e-3, 2e-3
    model.prefill_grain = 8.0
    return model


@given(choices(), st.floats(0, 4000))
def test_any_batch_is_the_sum_of_its_parts(chosen: list[int], context: float) -> None:
    made = batch(some_variants(), chosen, context)
    assert steps.decode_step_s(linear_model()[0], made[0]) == pytest.approx(by_hand(chosen, context))


@given(choices(), st.integers(1, 500))
def test_variants_take_other_times_in_wide_steps(chosen: list[int], tokens: int) -> None:
    model, variants = linear_model(), some_variants()
    model.prefill_s, model.wide_from, model.wide_launch_s = 0.05, 200, [1e-3, 2e-3, 3e-3, 4e-3]
    made = batch(variants, chosen, 30.0)
    narrow_s = 0.05 - 0.01 - 1e-4 * len(chosen) + by_hand(chosen, 30.0)
    wide_s = 0.05 + 1e-8 * 30.0 * len(chosen) + sum(variants.row_s[v] for v in chosen)
    wide_s += sum(variants.wide_variant_s[v] for v in set(chosen))
    wide_s += sum((kind + 1) * 1e-3 for kind in {int(variants.kind[v]) for v in chosen} - {-1})
    expected_s = wide_s if tokens + len(chosen) >= 200 else narrow_s
    assert steps.mixed_step_s(model[0], made[0], float(tokens), 7e-3) == pytest.approx(expected_s + 7e-3)


@given(choices(), st.integers(0, 5))
def test_the_cost_of_one_more_request_is_predicted(chosen: list[int], more: int) -> None:
    made, variants = batch(some_variants(), chosen, 50.0), some_variants()
    foretold = steps.step_with_one_more_s(
        linear_model()[0], made[0], variants[more], 50.0, more not in chosen
    )
    assert foretold == pytest.approx(by_hand([*chosen, more], 50.0))


@given(choices(), st.randoms())
def test_rows_leave_no_trace(chosen: list[int], order: object) -> None:
    variants = some_variants()
    made, left = batch(variants, chosen, 50.0), list(chosen)
    order.shuffle(left)  # type: ignore[attr-defined]
    while left:
        variant = left.pop()
        steps.remove(made[0], variants[variant], 50.0, variant not in left)
        if left:
            assert steps.decode_step_s(linear_model()[0], made[0]) == pytest.approx(by_hand(left, 50.0))
    assert steps.decode_step_s(linear_model()[0], made[0]) == 0.0
    assert made.tobytes() == records(BATCH, 1).tobytes()


def test_a_correction_finds_the_true_factor_and_forgives_a_pause() -> None:
    factor = 1.0
    for _ in range(3000):
        factor = correction.corrected(factor, 0.012, 0.010 * factor, 1.0)
    assert factor == pytest.approx(1.2, rel=0.01)
    paused = correction.corrected(factor, 30.0, 0.010 * factor, 1.0)
    assert paused == pytest.approx(factor, rel=0.02)


@given(*[st.floats(allow_nan=True, allow_infinity=True)] * 3)
def test_no_observation_takes_a_correction_out_of_its_bounds(
    observed_s: float, predicted_s: float, taken: float
) -> None:
    factor = correction.corrected(1.0, observed_s, predicted_s, taken)
    assert correction.LEAST <= factor <= correction.MOST
    mean = correction.error(0.1, observed_s, predicted_s, taken)
    assert math.isfinite(mean)
    assert 0.0 <= mean <= correction.CLIP


def test_measured_launches_of_kinds_are_counted_separately() -> None:
    """An engine that launches LoRA's and BOFT's kernels in every batch with variants: its mixes as
    predicted."""
    calibration = calibrate(LLAMA_7B, measurements())
    launching = replace(GROUND, calibration=calibration, launched=("lora", "boft"))
    specs = [
        synthetic_spec(LLAMA_7B, SyntheticVariant("lora", rank=16)),
        synthetic_spec(LLAMA_7B, SyntheticVariant("boft", factors=1, block_size=4)),
    ]
    model = step_model(launching, PLAN, max_rows=256, slots=8)
    variants = add_variants(model, launching, PLAN, specs, 10e9)
    expected = predict(launching, PLAN, Workload(6, 100, 20), [None, *specs]).step_s.value
    made = batch(variants, [0, 1, 2] * 2, 110)
    assert steps.decode_step_s(model[0], made[0]) == pytest.approx(expected, rel=0.03)
