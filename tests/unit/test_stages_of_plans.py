"""The time and memory of a single stage, against the predictions of whole plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measurements import Footprint, RankMemory, Setting
from profiler.physical.calibration import Cut
from profiler.predicting.predict import predict
from profiler.predicting.stages import decode_time, nearest, prompt_time, rank_lines
from profiler.roofline import HOP_S
from profiler.types import DeviceRates, Interval, Workload
from testkit.simulated_profile import BUDGET, CALIBRATION, MIB, OUT, RATES, ground, plan


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("merged_slot", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_stages_add_up_to_the_prediction_of_their_plan(tp: int, merged_slot: bool, known: bool) -> None:
    """Times are linear in layers, memory with the plan's whole cache is the largest of its lines."""
    more = {"delta_bytes": 640 * MIB, "full_bytes": 7 * MIB, "merged_slot": merged_slot}
    p, load = plan(tp, (10, 22), **more), Workload(1, 128, OUT)
    here = ground(p, known)
    found = predict(here, p, load)
    prompt, token = prompt_time(here, p, 128), decode_time(here, p, 1, 128 + OUT / 2)
    hop_s = CALIBRATION.hop_s if known else HOP_S
    close = 0.02 if known and tp == 4 else 1e-6  # a scaled prediction scales the hop as well
    assert prompt.of(32, is_last=True) + hop_s == pytest.approx(found.ttft_s.value, rel=close)
    assert token.of(32, is_last=True) + hop_s == pytest.approx(found.tpot_s.value, rel=close)
    for rank, cost in enumerate(found.ranks):
        stage = rank // tp
        lines, layers = rank_lines(here, p)[stage], (10, 22)[stage]
        tokens = 16 * 4096 * layers * 16384 // tp
        assert max(fixed + layers * each for fixed, each in lines) == pytest.approx(
            cost.total.value - cost.kv_cache + tokens, abs=32
        )


@pytest.mark.parametrize("back", [0, 100, 300, 1132])
def test_lines_of_bytes_hold_where_graphs_take_what_a_pass_gave_back(back: int) -> None:
    """Graphs of 300 MiB in 16 layers and of 560 in 32: few layers' are in what was given back of 1526 MiB."""
    ranks = {
        n: RankMemory(MIB, 1526 * MIB, graphs * MIB, 757 * MIB, 0, 0, (1527 + graphs + 757 - back) * MIB)
        for n, graphs in ((16, 300), (32, 560))
    }
    prints = tuple(Footprint(Setting((n,), batched_tokens=BUDGET), (rank,), 1.0) for n, rank in ranks.items())
    p = plan(1, (10, 22))
    here = replace(ground(p), calibration=replace(CALIBRATION, footprints=prints))
    for first in (1, 2, 3, 7, 16, 31):
        split = replace(p, layers_per_stage=(first, 32 - first))
        found = predict(here, split, Workload(1, 128, OUT)).ranks
        for stage, (cost, layers) in enumerate(zip(found, split.layers_per_stage, strict=True)):
            taken = max(fixed + layers * each for fixed, each in rank_lines(here, split)[stage])
            cached = p.kv_cache_tokens * layers * 16384
            assert taken == pytest.approx(cost.total.value - cost.kv_cache + cached, abs=4096)


def test_a_long_prompt_takes_several_steps() -> None:
    p = plan(batched_tokens=1024)
    once, twice = (prompt_time(ground(p), p, tokens).of(32, is_last=True) for tokens in (1024, 2048))
    assert twice > 2 * once
    assert twice == pytest.approx(predict(ground(p), p, Workload(1, 2048, OUT)).ttft_s.value)


def test_a_device_that_was_not_measured_is_scaled_and_less_certain() -> None:
    """Half the bandwidth and half the operations: everything takes twice as long."""
    slow = DeviceRates(RATES.memory_bytes_per_s / 2, RATES.flops_per_s / 2)
    here = ground(plan())
    there = replace(here, rates=(slow,), measured=RATES)
    one, other = (predict(g, plan(), Workload(4, 256, OUT)) for g in (here, there))
    assert other.tpot_s.value == pytest.approx(2 * one.tpot_s.value)
    assert other.ttft_s.value == pytest.approx(2 * one.ttft_s.value)
    assert _width(other.tpot_s) > _width(one.tpot_s)
    assert any("this kind of device was not measured" in note for note in other.notes)


@given(
    st.sets(st.builds(Cut, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "fp8"])), min_size=1),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["none", "fp8"]),
)
def test_layers_are_taken_for_those_stored_alike_then_for_those_of_the_nearest_tp(
    cuts: set[Cut], tp: int, stored: str
) -> None:
    times = dict.fromkeys(cuts, CALIBRATION.times[Cut(1)])
    found = nearest(replace(CALIBRATION, times=times), Cut(tp, stored))
    assert found.quantization == stored or stored not in {cut.quantization for cut in cuts}
    rivals = [cut.tensor_parallel for cut in cuts if cut.quantization == found.quantization]
    assert max(found.tensor_parallel, tp) // min(found.tensor_parallel, tp) == min(
        max(other, tp) // min(other, tp) for other in rivals
    )


def test_a_plan_is_not_predicted_from_layers_that_are_stored_otherwise() -> None:
    """Those of its TP are, and they are not its own."""
    times = {Cut(1): CALIBRATION.times[Cut(1)], Cut(2, "fp8"): CALIBRATION.times[Cut(2)]}
    without = replace(CALIBRATION, times={Cut(1): times[Cut(1)]})
    here = replace(ground(plan(2)), calibration=replace(CALIBRATION, times=times))
    load = Workload(1, 128, OUT)
    found = predict(here, plan(2), load)
    assert found == predict(replace(here, calibration=without), plan(2), load)
    assert any("TP=2 was not measured; scaled from TP=1" in note for note in found.notes)
    assert decode_time(here, plan(2), 1, 128) != decode_time(ground(plan(2)), plan(2), 1, 128)


def _width(interval: Interval) -> float:
    return (interval.high - interval.low) / interval.value
