"""The estimator that learns from fingerprints, against an engine simulated event by event."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.measurements import Measurement, Point, Setting
from profiler.physical.calibrating import TURN_ERROR, calibrate
from profiler.physical.calibration import LOST_PACE, Calibration, Cut
from profiler.physical.curves import Step, fit
from profiler.physical.pipeline import latency
from profiler.physical.prefill import MAX_STEPS, split_prefill
from profiler.predicting.predict import Ground, predict
from profiler.types import DeviceRates, Plan, Workload
from testkit.engine_simulator import ClientSees, Machine, measured, simulate
from testkit.known_models import LLAMA_7B

BUDGET, OUT, LAYERS = 8192, 64, 32
MACHINE = Machine()
SPLITS = ((32,), (16, 16), (10, 22), (22, 10), (4, 28), (8, 8, 8, 8), (5, 9, 9, 9), (12, 4, 4, 12))


def fingerprints(machine: Machine, noise: float = 0.0) -> list[Measurement]:
    """A profile's measurements: three ways to cut a layer, the first in two depths, and a pipeline."""
    wanted = ((1, LAYERS // 2), (1, LAYERS), (2, LAYERS), (4, LAYERS))
    settings = [Setting((depth,), tp, batched_tokens=BUDGET) for tp, depth in wanted]
    points = [Point(b, i) for b in (1, 2, 4, 8, 16, 32, 64, 128) for i in (128, 512, 2048)]
    short = [point for point in points if point.input_tokens == 128]
    pipeline = itertools.product([Setting((16, 16), batched_tokens=BUDGET)], short)
    loads = [*itertools.product(settings, points), *pipeline]
    rng = random.Random(0)
    return [measured(machine, s, p, OUT, BUDGET, 1 + rng.uniform(-noise, noise)) for s, p in loads]


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(LLAMA_7B, fingerprints(MACHINE))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_plans_that_were_not_measured(calibration: Calibration, split: tuple[int, ...], tp: int) -> None:
    for batch, length in itertools.product((1, 8, 32, 128), (300, 1000, 3000)):
        truth = measured(MACHINE, Setting(split, tp), Point(batch, length), OUT, BUDGET)
        found = latency(calibration, Cut(tp), split, Workload(batch, length, OUT))
        assert found.step_s == pytest.approx(truth.tpot_s, rel=0.04)
        assert found.ttft_s == pytest.approx(truth.ttft_s, rel=0.06)
        assert found.ttft_last_s == pytest.approx(truth.ttft_last_s, rel=0.06)


@pytest.mark.parametrize("split", [(32,), (16, 16), (10, 22), (8, 8, 8, 8)], ids=str)
@pytest.mark.parametrize("output", [2, 5, 20, OUT, 300])
def test_clients_wait_between_tokens_for_the_prompts_of_others(split: tuple[int, ...], output: int) -> None:
    """Steps of 2048 tokens: 64 prompts of 1,024 take 33 steps. Long answers all decode together at some time,
    and short ones end before the last prompt is filled."""
    points = [Point(b, i) for b in (1, 2, 4, 8, 16, 32, 64, 128) for i in (128, 1024)]
    settings = [Setting((32,)), Setting((16,)), Setting((16, 16))]
    found = calibrate(LLAMA_7B, [measured(MACHINE, s, p, OUT + 63, 2048) for s in settings for p in points])
    for batch, length in ((1, 1024), (8, 300), (32, 128), (64, 1024), (100, 700)):
        tokens = simulate(MACHINE, split, 1, Point(batch, length), output, 2048).tokens
        truth = ClientSees.of(tokens)
        guess = latency(found, Cut(1), split, Workload(batch, length, output))
        assert guess.ttft_s == pytest.approx(truth.ttft_s, rel=0.06), (batch, length)
        # The only gap of an answer of two tokens is within what is in flight when the next step is.
        near = 0.2 if output == 2 and len(split) > 1 else 0.08
        assert guess.tpot_s == pytest.approx(truth.tpot_s, rel=near), (batch, length)


def test_a_stage_pauses_for_work_outside_layers_except_the_head(calibration: Calibration) -> None:
    """The fit does so as far as depths separate that from layers, here or for another cut: one depth alone
    does not."""
    for tp, batch in itertools.product((1, 2, 4), (1, 16, 64)):
        pause_s = MACHINE.step_s + 2e-6 * batch
        assert calibration.at(Cut(tp)).gap_s(batch) == pytest.approx(pause_s, rel=0.15)
    alone = [m for m in fingerprints(MACHINE) if m.setting == Setting((LAYERS,), batched_tokens=BUDGET)]
    assert calibrate(LLAMA_7B, alone).at(Cut(1)).gap_s(64) == 0.0


@pytest.mark.parametrize(("share", "hop_s"), [(0.1, 1e-4), (0.3, 1e-4), (0.3, 0.0)])
@pytest.mark.parametrize("split", [(16, 16), (22, 10), (10, 22), (8, 8, 8, 8), (12, 8, 6, 6)], ids=str)
def test_one_time_costs_and_pauses_of_earlier_stages_are_fitted(
    split: tuple[int, ...], share: float, hop_s: float
) -> None:
    """Steps of 2048 tokens: time that later steps hide is not taken for a part of each step, and a stage is
    slower until the tokens of its step before have landed. Prompts of several steps, too: the later ones
    attend to more."""
    machine = replace(MACHINE, once_s=5e-3, lost_pace=share, hop_s=hop_s, pair_s=1e-10)
    points = [Point(b, i) for b in (1, 2, 4, 8, 16, 32, 64, 128) for i in (128, 1024)]
    settings = [Setting((32,)), Setting((16,)), Setting((16, 16))]
    seen = [measured(machine, s, p, OUT + 63, 2048) for s in settings for p in points]
    found = calibrate(LLAMA_7B, seen)
    assert found.times[Cut(1)].prefill.once_s == pytest.approx(5e-3, rel=0.2)
    assert found.lost_pace == {"none": pytest.approx(share, abs=0.02)}
    for batch, length in ((1, 1000), (8, 1000), (32, 128), (32, 1000), (128, 1024), (16, 5000), (1, 16384)):
        truth = measured(machine, Setting(split), Point(batch, length), OUT + 63, 2048)
        guess = latency(found, Cut(1), split, Workload(batch, length, OUT + 63))
        assert guess.ttft_s == pytest.approx(truth.ttft_s, rel=0.05), (batch, length)
        assert guess.ttft_last_s == pytest.approx(truth.ttft_last_s, rel=0.05), (batch, length)


@pytest.mark.parametrize("split", [(16, 16), (20, 12)], ids=str)
def test_no_request_waits_for_steps_that_end_no_prompt(
    split: tuple[int, ...], calibration: Calibration
) -> None:
    """A long prompt alone counts whole. Two prompts count only by what is in flight with the first one's last
    step."""
    lossy = replace(calibration, batched_tokens=2048, lost_pace={"none": 0.3})
    plain = replace(lossy, lost_pace={})
    one, two = Workload(1, 4 * 2048, 2), Workload(2, 4 * 2048, 2)
    assert latency(lossy, Cut(1), split, one) == latency(plain, Cut(1), split, one)
    slower, other = (
        simulate(replace(MACHINE, lost_pace=share), split, 1, Point(2, 4 * 2048), 2, 2048).end
        for share in (0.3, 0.0)
    )
    lost_s = latency(lossy, Cut(1), split, two).ttft_last_s - latency(plain, Cut(1), split, two).ttft_last_s
    assert lost_s == pytest.approx(slower - other, rel=0.1)
    assert slower > other


def test_a_quantization_without_a_measured_pipeline_loses_what_fp8_was_seen_to() -> None:
    """Where another quantization's pipeline loses any: elsewhere stages may be of a device that shares
    nothing."""
    points = [Point(b, i) for b in (1, 8, 32, 128) for i in (128, 1024)]
    settings = [Setting((32,)), Setting((16,)), Setting((32,), quantization="fp8")]
    seen = [measured(MACHINE, s, p, OUT + 63, 2048) for s in settings for p in points]

    def lost(share: float) -> tuple[float, float]:
        machine = replace(MACHINE, lost_pace=share)
        pipeline = [measured(machine, Setting((16, 16)), p, OUT + 63, 2048) for p in points]
        found = calibrate(LLAMA_7B, [*seen, *pipeline])
        return found.lost_pace_at(Cut(1)), found.lost_pace_at(Cut(1, "fp8"))

    for share, of_fp8 in ((0.1, LOST_PACE), (0.0, 0.0)):
        known, quantized = lost(share)
        assert known == pytest.approx(share, abs=0.02)
        assert quantized == of_fp8
    assert calibrate(LLAMA_7B, seen).lost_pace_at(Cut(1, "fp8")) == 0.0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("split", [(32,), (16, 16), (22, 10), (8, 8, 8, 8)], ids=str)
def test_steps_after_the_first_of_a_burst_take_longer(split: tuple[int, ...], tp: int) -> None:
    """A GPU that is kept busy computes a tenth longer: of 2048 tokens a layer 0.14 ms, whatever the stage.
    TP is measured in one depth, which alone does not tell that from what comes once."""
    machine = replace(MACHINE, busy=1.1)
    points = [Point(b, i) for b in (1, 2, 4, 8, 16, 32, 64, 128) for i in (128, 1024)]
    settings = [Setting((32,)), Setting((16,)), Setting((16, 16)), Setting((32,), 2)]
    seen = [measured(machine, s, p, OUT + 63, 2048) for s in settings for p in points]
    found = calibrate(LLAMA_7B, seen)
    later_s = found.times[Cut(tp)].prefill.later_s * 2048
    assert later_s == pytest.approx(0.1 * machine.layer_bytes * 2048 / machine.flops / tp, rel=0.2)
    for batch, length in itertools.product((1, 16, 32, 128), (128, 1000)):
        truth = measured(machine, Setting(split, tp), Point(batch, length), OUT + 63, 2048)
        guess = latency(found, Cut(tp), split, Workload(batch, length, OUT + 63))
        assert guess.ttft_last_s == pytest.approx(truth.ttft_last_s, rel=0.04)


def test_one_depth_alone_does_not_say_that_later_steps_take_longer() -> None:
    """No other load separates a step's time from one-time costs: where every step takes as long and 30 ms
    come once, these do."""
    machine = replace(MACHINE, once_s=30e-3)
    loads = [Point(b, i) for b in (1, 8, 32, 128) for i in (128, 1024)]
    found = calibrate(LLAMA_7B, [measured(machine, Setting((32,)), p, OUT + 63, 2048) for p in loads])
    assert found.at(Cut(1)).prefill.later_s == 0.0
    truth = measured(machine, Setting((32,)), Point(2, 1024), OUT + 63, 2048)
    guess = latency(found, Cut(1), (32,), Workload(2, 1024, OUT + 63))
    assert guess.ttft_s == pytest.approx(truth.ttft_s, rel=0.03)


def test_turns_that_differ_from_engine_to_engine_widen_what_they_decide() -> None:
    """The host takes a group 4 ms, 20% more under some loads and less under others; a stage takes 2.1 ms."""
    pipeline = Setting((16, 16), batched_tokens=BUDGET)
    loads = [Point(b, 2500) for b in (4, 5, 6, 7)]  # in two groups
    plain = [measured(MACHINE, pipeline, load, OUT + 63, BUDGET) for load in loads]
    seen = [replace(m, tpot_s=8e-3 * (1.2 if m.point.batch % 2 else 1 / 1.2)) for m in plain]
    whole = [m for m in fingerprints(MACHINE) if len(m.setting.layers_per_stage) == 1]
    found = calibrate(LLAMA_7B, [*whole, *seen])
    assert found.turn_s == pytest.approx(4e-3, rel=0.01)
    assert found.turn_error == pytest.approx(math.log(1.2), rel=0.01)
    ground = Ground(LLAMA_7B, (DeviceRates(1.0, 1.0),) * 2, found)
    split = Plan(1, (16, 16), "none", BUDGET, 0, 0, 0)
    decided, alone = (predict(ground, split, Workload(batch, 2500, OUT)).step_s for batch in (6, 1))
    assert decided.low < 8e-3 / 1.2 < 8e-3 * 1.2 < decided.high
    assert alone.high / alone.low < decided.high / decided.low
    few = calibrate(LLAMA_7B, [*whole, seen[0]])
    assert few.turn_error == TURN_ERROR  # one load says nothing about others


def test_turns_that_no_stage_let_see_may_be_as_long_as_what_hid_them(calibration: Calibration) -> None:
    """The profile has one pipeline with two groups; in four stages a step of each is shorter."""
    pipeline = Setting((16, 16), batched_tokens=BUDGET)
    most_s = measured(MACHINE, pipeline, Point(128, 128), OUT, BUDGET).tpot_s / 2
    assert calibration.turn_s == 0.0
    assert calibration.turn_most_s == pytest.approx(most_s)
    ground = Ground(LLAMA_7B, (DeviceRates(1.0, 1.0),) * 4, calibration)
    quarters = Plan(1, (8, 8, 8, 8), "none", BUDGET, 0, 0, 0, batched_tokens=BUDGET)
    several, alone = (predict(ground, quarters, Workload(batch, 128, OUT)).step_s for batch in (256, 1))
    assert several.high == pytest.approx(4 * most_s)
    assert several.value < 0.8 * several.high
    assert alone.high < 1.3 * alone.value


@pytest.mark.parametrize("output", [1, 2, 8, 64])
def test_sequences_that_have_their_tokens_make_room(calibration: Calibration, output: int) -> None:
    """256 prompts take 32 steps; with few tokens out the first have ended long before the last begin."""
    truth = measured(MACHINE, Setting((32,)), Point(256, 1024), max(2, output), BUDGET)
    guess = latency(calibration, Cut(1), (32,), Workload(256, 1024, output))
    assert guess.ttft_last_s == pytest.approx(truth.ttft_last_s, rel=0.06)


def test_profiles_of_few_loads_keep_to_what_they_saw() -> None:
    """A CPU: steps of 20 ms, nothing once. And prompts of 128 tokens only: larger steps are longer."""
    slow = replace(MACHINE, once_s=0.0, step_s=20e-3)
    few = [Point(1, 32), Point(1, 256), Point(4, 64), Point(16, 32)]
    found = calibrate(LLAMA_7B, [measured(slow, Setting((30,)), p, 12, 2048) for p in few])
    assert found.times[Cut(1)].prefill.once_s == 0.0
    small = [Point(1, 128), Point(32, 128)]
    usual = replace(MACHINE, pair_s=5e-11)  # a pair's operations, not its bytes
    found = calibrate(LLAMA_7B, [measured(usual, Setting((30,)), p, 48, 2048) for p in small])
    truth = measured(usual, Setting((30,)), Point(1, 1024), 48, 2048)
    guess = latency(found, Cut(1), (30,), Workload(1, 1024, 48))
    assert guess.ttft_s == pytest.approx(truth.ttft_s, rel=0.2)


def test_no_load_takes_long_to_follow() -> None:
    for workload in (Workload(4096, 128, 16), Workload(1024, 32768, 512), Workload(512, 64, 100_000)):
        split_prefill.cache_clear()
        began = time.process_time()
        found = split_prefill(workload, 2048, 4)
        assert time.process_time() - began < 1.0  # it is a few hundredths on a slow core
        assert sum(f.tokens * f.count for f in found.steps) == pytest.approx(
            workload.batch * workload.input_tokens
        )


def test_an_uneven_pipeline_costs_under_load_only(calibration: Calibration) -> None:
    """In steps of percents, as the simulated engine says."""

    def cost(batch: int) -> tuple[float, float]:
        work, point = Workload(batch, 512, OUT), Point(batch, 512)
        even, uneven = (latency(calibration, Cut(1), s, work).step_s for s in ((16, 16), (10, 22)))
        runs = [simulate(MACHINE, s, 1, point, OUT, BUDGET).step_s for s in ((16, 16), (10, 22))]
        return uneven / even - 1, runs[1] / runs[0] - 1

    for batch in (1, 128):
        predicted, simulated = cost(batch)
        assert predicted == pytest.approx(simulated, abs=0.02)
    assert cost(1)[0] < 0.01
    assert cost(128)[0] > 0.2


@pytest.mark.parametrize("split", [(16, 16), (4, 28), (8, 8, 8, 8)], ids=str)
def test_prompts_of_a_cut_that_was_measured_in_one_depth_are_filled_by_layers(split: tuple[int, ...]) -> None:
    """Profiles measure TP=2 so: a pipeline's stages take their share of a step, none takes it as the rest."""
    points = [Point(b, i) for b in (1, 2, 4, 8, 16, 32, 64, 128) for i in (128, 1024)]
    settings = [Setting((32,)), Setting((16,)), Setting((32,), 2), Setting((16, 16))]
    for machine in (MACHINE, replace(MACHINE, pair_s=0.0), replace(MACHINE, pair_s=5e-11)):
        seen = [measured(machine, s, p, OUT + 63, 2048) for s in settings for p in points]
        found = calibrate(LLAMA_7B, seen)
        for batch, length in itertools.product((1, 8, 32), (128, 1000)):
            truth = measured(machine, Setting(split, 2), Point(batch, length), OUT + 63, 2048)
            guess = latency(found, Cut(2), split, Workload(batch, length, OUT + 63))
            assert guess.ttft_s == pytest.approx(truth.ttft_s, rel=0.15)


def test_noise_of_measurements_does_not_grow(calibration: Calibration) -> None:
    noisy = calibrate(LLAMA_7B, fingerprints(MACHINE, noise=0.03))
    errors = [
        latency(noisy, Cut(1), split, work).step_s / latency(calibration, Cut(1), split, work).step_s - 1
        for split in SPLITS
        for work in (Workload(b, 300, OUT) for b in (1, 8, 32, 128))
    ]
    assert statistics.median(map(abs, errors)) < 0.02
    assert max(map(abs, errors)) < 0.05


def test_loads_with_one_decoding_request_say_nothing_about_batches() -> None:
    """Steps of 2048 tokens: 128 prompts of 1024 take 64 steps, and the first has ended long before."""
    setting = Setting((LAYERS,))
    usual = [
        measured(MACHINE, setting, Point(batch, length), 32, 2048)
        for batch in (1, 8, 32, 128)
        for length in (128, 1024)
        if batch * length <= 32 * 1024
    ]
    apart = measured(MACHINE, setting, Point(128, 1024), 32, 2048)
    assert not apart.together
    assert all(timing.together for timing in usual)
    with_it, without = calibrate(LLAMA_7B, [*usual, apart]), calibrate(LLAMA_7B, usual)
    assert with_it.times[Cut(1)].decode == without.times[Cut(1)].decode
    long_enough = measured(MACHINE, setting, Point(128, 1024), 32 + 63, 2048)
    assert long_enough.together
    found = latency(calibrate(LLAMA_7B, [*usual, long_enough]), Cut(1), (LAYERS,), Workload(128, 1024, 95))
    assert found.step_s == pytest.approx(long_enough.tpot_s, rel=0.03)


def test_short_contexts_and_noise_do_not_make_long_contexts_dear() -> None:
    """A layer takes a second and a pair a millionth of one; two contexts were measured, with 10% of noise.
    For 8000 tokens, which take 1.008 s, noise alone would predict up to 7 s."""
    rng = random.Random(3)
    for _ in range(200):
        steps = [
            Step(1, context, 1, (1 + 1e-6 * context) * (1 + rng.uniform(-0.1, 0.1))) for context in (38, 262)
        ]
        assert 0.9 < fit(steps, 0.0, 1e-6).layers_s(1, 1, 8000) < 2.0


def test_nothing_measured_is_an_error(calibration: Calibration) -> None:
    with pytest.raises(ValueError, match="at least one"):
        calibrate(LLAMA_7B, [])
    mixed = [measured(MACHINE, Setting((4,), batched_tokens=n), Point(1, 8), 8, n) for n in (64, 128)]
    with pytest.raises(ValueError, match="steps of \\[64, 128\\]"):
        calibrate(LLAMA_7B, mixed)
    with pytest.raises(KeyError):
        latency(calibration, Cut(8), (32,), Workload(1, 1, 1))


# --- the fit ----------------------------------------------------------------------------------------

POSITIVE = st.floats(1e-6, 1e-2)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=5), st.floats(0, 1e-8))
def test_a_fit_recovers_the_times_it_was_made_of(rises: list[tuple[float, float]], pair_s: float) -> None:
    """Times that rise with the work, two depths and two contexts: everything is determined."""
    rest = list(itertools.accumulate(r for r, _ in rises))
    layer = list(itertools.accumulate(y for _, y in rises))
    steps = [
        Step(2.0**k, 2.0**k * c, n, rest[k] + n * (layer[k] + pair_s * 2.0**k * c))
        for k in range(len(rises))
        for n in (1, 8)
        for c in (100, 1000)
    ]
    found = fit(steps, beside=0.5)
    assert found.error < 0.02
    for step in steps:
        again = found.rest_s(step.work) + found.layers_s(step.layers, step.work, step.pairs)
        assert again == pytest.approx(step.seconds, rel=0.05)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4), POSITIVE), min_size=1, max_size=12),
    st.floats(0, 10),
)
def test_a_fit_never_falls_and_never_is_negative(points: list[tuple[int, int, float]], ratio: float) -> None:
    found = fit([Step(work, 10.0 * work, layers, s) for work, layers, s in points], ratio)
    times = [found.rest_s(w) + found.layers_s(7, w, 10 * w) for w in range(1, 100)]
    assert min(times) >= 0
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times))


def test_one_depth_is_divided_as_the_bytes_are() -> None:
    found = fit([Step(1, 0, 10, 6.0)], beside=2.0)  # 10 layers and a rest of two: half a second each
    assert found.layers_s(1, 1, 0) == pytest.approx(0.5, rel=0.01)
    assert found.rest_s(1) == pytest.approx(1.0, rel=0.01)


@given(st.integers(1, 200), st.integers(1, 4000), st.integers(16, 8192))
def test_fills_take_every_token_and_end_every_prompt(batch: int, length: int, budget: int) -> None:
    found = split_prefill(Workload(batch, length, 8), budget)
    steps = found.steps
    assert len(steps) <= MAX_STEPS
    assert 1 - 1e-6 <= found.reporting <= sum(f.count for f in steps) + 1e-6
    assert sum(f.pairs * f.count for f in steps) == pytest.approx(batch * length * (length + 1) / 2)
    assert sum(f.tokens * f.count for f in steps) == pytest.approx(batch * length)
    assert sum(f.requests for f in steps) == pytest.approx(batch)
    assert all(0 < f.tokens <= budget for f in steps)
    assert all(f.tokens + f.decoding <= max(budget, batch + budget / 16 + 1) for f in steps)
