"""The time of variants in a burst, learnt from a profile's loads: against an engine simulated event by event,
whose kernels follow another law than the estimator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from profiler.measurements import Point, SyntheticVariant, Timing, from_lines
from profiler.physical.calibrating import calibrate
from profiler.physical.calibration import Calibration, Cut
from profiler.physical.variants import decode_time, variant_load
from profiler.predicting.predict import Ground, Prediction, predict
from profiler.profiling_plan import Reach, profiling_plan
from profiler.types import Interval, Plan, Workload, adaptable_linears
from profiler.variants.synthetic import synthetic_spec
from profiler.variants.types import VariantSpec
from testkit.engine_simulator import ClientSees, Kernel, Machine, measured, simulate
from testkit.known_models import LLAMA_7B
from testkit.simulated_profile import RATES

STEP, OUT = 2048, 64
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "profiling"
MACHINE = Machine(pair_s=5e-9)
REACH = Reach(False, 1, 80 << 30, 4096, 64, STEP, max_variants=8)
ALL_KINDS = ("lora", "boft", "sparse_delta")
# By kind: seconds of a layer for a launch, and the least seconds for reading.
LAUNCH_S = {"lora": 10e-6, "sparse_delta": 30e-6, "boft": 60e-6}
FLOOR_S = {"lora": 15e-6, "sparse_delta": 50e-6, "boft": 10e-6}
MADE: dict[str, dict[str, int]] = {
    "lora": {"rank": 16},
    "sparse_delta": {"bits": 4},
    "boft": {"factors": 1, "block_size": 8},
}


def kernel(variant: SyntheticVariant) -> Kernel:
    """One layer, by hand: 2:4 sparse deltas multiply half of the weights, LoRAs two factors, BOFTs blocks."""
    spec, flops = synthetic_spec(LLAMA_7B, variant), 0
    for linear in adaptable_linears(LLAMA_7B).values():
        if variant.kind == "lora":
            flops += 2 * variant.rank * (linear.out + linear.into)
        elif variant.kind == "sparse_delta":
            flops += linear.out * linear.into
        else:
            flops += 2 * variant.factors * variant.block_size * linear.into + linear.out
    read = sum(facts.size_bytes for facts in spec.modules.values())
    kind = variant.kind
    return Kernel(
        kind, read, flops, LAUNCH_S[kind], FLOOR_S[kind], slower=1.5 if kind == "sparse_delta" else 3.0
    )


def with_mix(mix: tuple[SyntheticVariant | None, ...], launched: tuple[str, ...] = ()) -> Machine:
    kernels = tuple(None if variant is None else kernel(variant) for variant in mix)
    return replace(MACHINE, mix=kernels, launched=tuple((kind, LAUNCH_S[kind]) for kind in launched))


@cache
def profile() -> tuple[Timing, ...]:
    found = []
    for run in profiling_plan(LLAMA_7B, REACH):
        for point in run.points:
            steps = run.setting.prefill_steps(point.batch, point.input_tokens)
            machine = with_mix(point.mix, run.setting.launched) if point.mix else MACHINE
            found.append(measured(machine, run.setting, point, run.output_tokens + steps - 1, STEP))
    return tuple(found)


@cache
def calibration() -> Calibration:
    return calibrate(LLAMA_7B, profile())


def variants(kind: str, count: int) -> tuple[SyntheticVariant, ...]:
    return tuple(SyntheticVariant(kind, seed=seed, **MADE[kind]) for seed in range(count))


def estimate(
    known: Calibration, mix: tuple[SyntheticVariant | None, ...], load: Workload, launched: tuple[str, ...]
) -> Prediction:
    plan = Plan(1, (32,), "none", 4096, 64 * 4096, 8, 16, batched_tokens=STEP)
    specs = [None if variant is None else synthetic_spec(LLAMA_7B, variant) for variant in mix]
    return predict(Ground(LLAMA_7B, (RATES,), known, launched=launched), plan, load, specs)


def truth(mix: tuple[SyntheticVariant | None, ...], load: Workload, launched: tuple[str, ...]) -> ClientSees:
    point = Point(load.batch, load.input_tokens)
    return ClientSees.of(simulate(with_mix(mix, launched), (32,), 1, point, load.output_tokens, STEP).tokens)


MIXES: dict[str, tuple[SyntheticVariant | None, ...]] = {
    "two deltas": variants("sparse_delta", 2),
    "base, LoRA, delta": (None, *variants("lora", 1), *variants("sparse_delta", 1)),
    "base, LoRA, delta, BOFT": (
        None,
        *variants("lora", 1),
        *variants("sparse_delta", 1),
        *variants("boft", 1),
    ),
    "two LoRAs, six deltas": (*variants("lora", 2), *variants("sparse_delta", 6)),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize(
    ("batch", "length"), [(1, 128), (8, 128), (32, 128), (64, 128), (32, 512), (64, 1024)]
)
def test_a_mix_takes_the_time_that_its_clients_see(
    mix: tuple[SyntheticVariant | None, ...], batch: int, length: int
) -> None:
    """Bursts with few clients and with many, some of which ask the base; with prompts that are filled while
    others decode."""
    kinds = {variant.kind for variant in mix if variant}
    launched = tuple(kind for kind in ALL_KINDS if kind == "lora" or kind in kinds)
    load = Workload(batch, length, OUT)
    found, seen = estimate(calibration(), mix, load, launched), truth(mix, load, launched)
    assert found.ttft_s.value == pytest.approx(seen.ttft_s, rel=0.12)
    assert found.tpot_s.value == pytest.approx(seen.tpot_s, rel=0.12)
    assert found.latency_s.value == pytest.approx(seen.latency_s, rel=0.1)
    assert found.ttft_s.holds(seen.ttft_s)
    assert found.tpot_s.holds(seen.tpot_s)
    assert found.latency_s.holds(seen.latency_s)
    assert found.tokens_per_s.holds(batch * OUT / seen.latency_s)


@pytest.mark.parametrize("clients", [8, 32, 64])
def test_beyond_the_loads_that_were_measured_ranges_are_wide_enough(clients: int) -> None:
    """A profile of loads with at most eight requests and two variants, as earlier ones are."""
    few = [t for t in profile() if not t.point.mix or (t.point.batch <= 8 and t.point.input_tokens < 1024)]
    few = [t for t in few if len(set(t.point.mix)) <= 2 and len({v.kind for v in t.point.mix}) < 2]
    mix, load = MIXES["two LoRAs, six deltas"], Workload(clients, 128, OUT)
    launched = ("lora", "sparse_delta")
    earlier = estimate(calibrate(LLAMA_7B, few), mix, load, launched)
    now, seen = estimate(calibration(), mix, load, launched), truth(mix, load, launched)
    assert earlier.latency_s.holds(seen.latency_s)
    assert earlier.tpot_s.holds(seen.tpot_s)
    assert _width(earlier.tpot_s) > 1.3 * _width(now.tpot_s)


def _width(interval: Interval) -> float:
    return (interval.high - interval.low) / interval.value


@pytest.mark.parametrize(
    "launched", [("lora",), ("lora", "sparse_delta"), ("lora", "boft"), ("lora", "boft", "sparse_delta")]
)
def test_kernels_that_find_nothing_to_do_count_where_the_engine_launches_them(
    launched: tuple[str, ...],
) -> None:
    mix = variants("lora", 2)
    load = variant_load(LLAMA_7B, [synthetic_spec(LLAMA_7B, one) for one in mix], 8, launched)
    alone = variant_load(LLAMA_7B, [synthetic_spec(LLAMA_7B, one) for one in mix], 8, ("lora",))
    unused_s = sum(LAUNCH_S[kind] for kind in launched if kind != "lora")
    found = (
        decode_time(calibration(), Cut(1), load).added_s - decode_time(calibration(), Cut(1), alone).added_s
    )
    assert found == pytest.approx(unused_s, rel=0.35, abs=1e-6)


def test_a_batch_of_the_base_alone_launches_no_kernels_of_variants() -> None:
    assert not variant_load(LLAMA_7B, [None], 8, ("lora", "boft")).kinds


def test_no_figure_is_invented_for_an_unmeasured_kind_of_engine() -> None:
    """For a profile that was cut off before LoRA's engine, BOFT's measured memory counts for both kinds."""
    found = [t for t in profile() if not t.point.mix or t.setting.launched == ("lora", "boft")]
    assert calibrate(LLAMA_7B, found).variants == {}


def test_measured_variants_have_narrower_ranges_and_are_marked_so() -> None:
    load, mix = Workload(8, 128, OUT), variants("lora", 2)
    unmeasured = calibrate(LLAMA_7B, [t for t in profile() if not t.point.mix])
    known, unknown = (estimate(found, mix, load, ("lora",)) for found in (calibration(), unmeasured))
    assert not any("variants" in note for note in known.notes)
    assert any("variants" in note for note in unknown.notes)
    alone = estimate(calibration(), (), load, ())
    assert known.tpot_s.low > alone.tpot_s.low


def test_variants_in_a_profile_do_not_change_what_the_base_takes() -> None:
    unmeasured = calibrate(LLAMA_7B, [t for t in profile() if not t.point.mix])
    assert calibration().times == unmeasured.times


def test_equal_members_are_one_variant_and_others_are_not() -> None:
    (one,) = [synthetic_spec(LLAMA_7B, variant) for variant in variants("sparse_delta", 1)]
    other = replace(one)

    def distinct(mix: list[VariantSpec | None]) -> int:
        return variant_load(LLAMA_7B, mix, 8).kinds[0].distinct

    assert [distinct([one]), distinct([one, one, None]), distinct([one, other])] == [1, 1, 2]


# --- against an H200 --------------------------------------------------------------------------------

SEEN = tuple(
    from_lines(
        (RESULTS / "variants_h200.jsonl").read_text().splitlines(),
        "a profile of Llama-2-7B's shape, vLLM 0.26",
    )
)
MIXED = [m for m in SEEN if isinstance(m, Timing) and m.point.mix]


def held_out(known: Calibration, load: Timing) -> dict[str, tuple[Interval, float]]:
    """The estimated and the measured figures of one load."""
    point = load.point
    work = Workload(point.batch, point.input_tokens, load.output_tokens)
    found = estimate(known, point.mix, work, load.setting.launched)
    return {
        "TTFT": (found.ttft_s, load.ttft_s),
        "step": (found.step_s, load.tpot_s),
        "latency": (found.latency_s, load.latency_s),
    }


def test_each_load_of_an_h200_is_foretold_by_the_others() -> None:
    """One LoRA to four, one 4-bit delta to four, and both, asked by 1 to 64 requests."""
    figures = [
        figure
        for load in MIXED
        for figure in held_out(calibrate(LLAMA_7B, [m for m in SEEN if m is not load]), load).values()
    ]
    assert len(figures) > 75
    assert sum(interval.holds(seen) for interval, seen in figures) >= 0.95 * len(figures)
    off = sorted(abs(seen / interval.value - 1) for interval, seen in figures)
    assert off[len(off) // 2] < 0.04
    assert off[int(0.95 * len(off))] < 0.15


def test_eight_requests_on_an_h200_predict_sixty_four() -> None:
    few = [m for m in SEEN if not isinstance(m, Timing) or not m.point.mix or m.point.batch <= 8]
    known = calibrate(LLAMA_7B, few)
    figures = [f for load in MIXED if load.point.batch > 8 for f in held_out(known, load).values()]
    assert sum(interval.holds(seen) for interval, seen in figures) >= 0.9 * len(figures)
