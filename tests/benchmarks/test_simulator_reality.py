"""Step times fitted to loads, against those that the loads were made with; one request, by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence

import pytest

from benchmarks.simulator_reality import measuring
from benchmarks.simulator_reality.calibrating import step_times
from benchmarks.simulator_reality.comparing import figures
from benchmarks.simulator_reality.loads import FIRST, LONGER, OUTPUT, SHORT, Load, burst, context_loads, loads
from benchmarks.simulator_reality.measuring import Measured, Workload
from benchmarks.simulator_reality.seeing import (
    Seen,
    burst_figures,
    figures_with_prompts,
    prompts_among_rows,
    see,
)
from benchmarks.simulator_reality.simulated import simulate
from benchmarks.simulator_reality.types import Asked, Facts, Timed, VariantFacts
from profiler.step_time.steps import prefill_curve_s

FACTS = Facts(
    groups=2,
    rows=8,
    slots=3,
    kv_tokens=8192,
    batched_tokens=2048,
    max_model_len=512,
    max_ongoing=64,
    policy="most-idle",
    path_s=0.003,
    variants=(
        VariantFacts("a", "lora", 8, 10_000),
        VariantFacts("b", "lora", 64, 80_000),
        VariantFacts("c", "sparse_delta", 0, 1_000_000),
    ),
    wide_from=200,
)
ROW_S = {"lora": 2e-4, "sparse_delta": 5e-4}
BYTE_S = {"lora": 1e-8, "sparse_delta": 2e-9}
LAUNCH_S = {"lora": 3e-3, "sparse_delta": 4e-3}
CONTEXT_S, TOKEN_S, ADDED_S = 2e-6, 1e-4, 5e-6
WIDE_S, WIDE_LAUNCH_S = {"lora": 1e-3, "sparse_delta": 6e-3}, {"lora": 2e-3, "sparse_delta": 9e-3}
WIDE_TOKEN_S = {"lora": 2e-6, "sparse_delta": 4e-5}


def asked_of(load: Load) -> list[VariantFacts]:
    """The variants of a load's rows."""
    asked = [load.models[i % len(load.models)] for i in range(load.rows)]
    return [FACTS.variants[model - 1] for model in asked if model]


def once_s(variants: Sequence[VariantFacts]) -> float:
    """The added time of distinct variants, and of kinds."""
    seconds = sum(BYTE_S[one.kind] * one.size_bytes for one in set(variants))
    return seconds + sum(LAUNCH_S[kind] for kind in {one.kind for one in variants})


def tpot_s(load: Load) -> float:
    """Steps of 10 ms and 1 ms for each row; and what `ROW_S`, `BYTE_S` and `LAUNCH_S` say."""
    chosen = asked_of(load)
    seconds = 10e-3 + 1e-3 * load.rows + CONTEXT_S * load.rows * (load.prompt + load.output / 2)
    return seconds + sum(ROW_S[one.kind] for one in chosen) + once_s(chosen)


def filling_s(prompt: int, model: int, rows: Sequence[VariantFacts], others: int) -> float:
    """A step with a prompt and `others` rows, of which `rows` are variants'."""
    seconds, own = 8e-3 + TOKEN_S * (prompt + others), [FACTS.variants[model - 1]] if model else []
    seconds += sum(ROW_S[one.kind] for one in rows)
    if prompt + others < FACTS.wide_from:
        return seconds + once_s(rows) + ADDED_S * prompt * len(own)
    present = {*rows, *own}
    seconds += sum(WIDE_S[one.kind] for one in present) + sum(WIDE_TOKEN_S[one.kind] * prompt for one in own)
    return seconds + sum(WIDE_LAUNCH_S[kind] for kind in {one.kind for one in present})


def ttft_s(load: Load) -> float:
    """A variant's prompt by itself takes once what its variant and kind take."""
    (model,) = load.models[:1]
    alone_s = once_s([FACTS.variants[model - 1]]) if model and load.prompt < FACTS.wide_from else 0.0
    return FACTS.path_s + filling_s(load.prompt, model, [], 0) + alone_s


def step_s(load: Load) -> float:
    if load.beside is None:
        return 0.0
    model, prompt = load.beside
    return filling_s(prompt, model, asked_of(load), load.rows) + CONTEXT_S * load.rows * (SHORT + LONGER / 2)


SEEN = [Seen(load, ttft_s(load), tpot_s(load), step_s(load)) for load in loads(FACTS)]
UNKNOWN_PATH = dataclasses.replace(FACTS, path_s=0.0)


def test_the_base_is_found_again() -> None:
    model, _ = step_times(UNKNOWN_PATH, SEEN)
    assert model[0].context_s == pytest.approx(CONTEXT_S)
    for rows in range(1, 65):
        assert model[0].decode_s[rows] == pytest.approx(10e-3 + 1e-3 * rows)
    for tokens in (SHORT, 100, 300, 2048):
        assert prefill_curve_s(model[0], float(tokens)) == pytest.approx(8e-3 + TOKEN_S * tokens, rel=0.01)
    assert (model[0].max_rows, model[0].kv_tokens, model[0].wide_from) == (8, 8192, 200)
    assert model[0].path_s == pytest.approx(FACTS.path_s, rel=0.05)


def test_the_request_path_is_the_known_path_where_no_prompt_joined_a_batch() -> None:
    model, _ = step_times(FACTS, [one for one in SEEN if one.load.beside is None])
    assert model[0].path_s == FACTS.path_s


@pytest.mark.parametrize("models", [(1,), (2,), (3,), (1, 2), (0, 3), (1, 2, 3)])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_steps_with_variants_take_their_measured_time(models: tuple[int, ...], rows: int) -> None:
    """The model also covers batches that no load had."""
    model, variants = step_times(FACTS, SEEN)
    load = Load(rows, SHORT, OUTPUT, models)
    asked = [models[i % len(models)] for i in range(rows)]
    seconds = model[0].decode_s[rows] + model[0].context_s * rows * (SHORT + OUTPUT / 2)
    seconds += sum(variants[n].row_s for n in asked) + sum(variants[n].variant_s for n in set(asked))
    seconds += sum(model[0].launch_s[kind] for kind in {variants[n].kind for n in asked if n})
    assert seconds == pytest.approx(tpot_s(load), rel=0.01)


def test_a_variant_s_added_time_on_prompts_is_measured() -> None:
    """The request path also includes prompts that joined no rows."""
    _, variants = step_times(FACTS, SEEN)
    assert [one.token_s for one in variants] == pytest.approx([0.0, ADDED_S, ADDED_S, ADDED_S], rel=1e-3)


def test_a_variant_s_added_time_on_wide_steps_is_measured() -> None:
    """A kind with one variant does not show which part of the time is the variant's and which the kind's."""
    model, variants = step_times(FACTS, SEEN)
    for row, variant in zip(variants[1:], FACTS.variants, strict=True):
        once_s = WIDE_S[variant.kind] + WIDE_LAUNCH_S[variant.kind]
        assert row.wide_variant_s + model[0].wide_launch_s[row.kind] == pytest.approx(once_s, rel=0.05)
        assert row.wide_token_s == pytest.approx(WIDE_TOKEN_S[variant.kind], rel=0.1)
    assert model[0].wide_launch_s[0] == pytest.approx(WIDE_LAUNCH_S["lora"], rel=0.1)


@pytest.mark.parametrize("load", [load for load in loads(FACTS) if load.beside])
def test_prefill_steps_are_recognised_by_the_rows_in_the_same_step(load: Load) -> None:
    """The simulator's own, which takes for them what `step_s` says."""
    model, variants = step_times(FACTS, SEEN)
    model.decode_s[0, : FACTS.rows + 1] = [10e-3 + 1e-3 * rows for rows in range(FACTS.rows + 1)]

    async def play(asked: Sequence[Asked]) -> list[Timed]:
        return simulate(FACTS, model, variants, asked)

    seen = {one.load: one for one in SEEN}
    alone = Load(load.rows, load.prompt, load.output, load.models)
    seen[alone] = asyncio.run(see(play, FACTS, alone, seen))
    found = asyncio.run(see(play, FACTS, load, seen))
    assert found.step_s == pytest.approx(step_s(load), rel=0.03)


def test_prompts_arrive_while_the_rows_decode() -> None:
    load = Load(4, SHORT, LONGER, (1, 2), (3, 100))
    alone, one = Seen(load, 0.05, 0.02), Seen(Load(1, 100, FIRST, (3,)), 0.3, 0.02)
    asked = prompts_among_rows(load, 2, alone, one)
    assert {(ask.model, ask.prompt, ask.output) for ask in asked} == {(3, 100, 1)}
    times = [ask.at_s for ask in asked]
    assert times[::2] == times[1::2]  # one for each group
    assert len(times) >= 4
    assert 2 * alone.ttft_s <= times[0]
    assert times[-1] + one.ttft_s < alone.ttft_s + alone.tpot_s * (LONGER - 1)
    assert min(b - a for a, b in zip(times[::2], times[2::2], strict=False)) > one.ttft_s + 4 * alone.tpot_s


def test_rows_take_as_much_longer_as_the_steps_that_fill_prompts() -> None:
    """95 steps of 20 ms, of which 3 take 50 ms; the fourth prompt comes too late."""
    load = Load(2, SHORT, LONGER, (1,), (0, 100))
    total_s = 0.1 + 92 * 0.02 + 3 * 0.05
    rows = [Timed(0.1, (total_s - 0.1) / 95, total_s)] * 2
    prompts = [Asked(at_s, 0, 100, 1) for at_s in (0.5, 1.0, 1.5, 2.5)]
    times = [*rows, *(Timed(0.07, 0.0, 0.07) for _ in prompts)]
    seen = figures_with_prompts(load, [*burst(load, 1), *prompts], times, Seen(load, 0.1, 0.02), groups=1)
    assert (seen.ttft_s, seen.step_s) == pytest.approx((0.07, 0.05))


def test_bursts_give_every_group_the_same() -> None:
    asked = burst(Load(3, SHORT, FIRST, (0, 2)), groups=2)
    assert [one.model for one in asked[::2]] == [one.model for one in asked[1::2]] == [0, 2, 0]
    assert {one.at_s for one in asked} == {0.0}


def test_tpot_is_that_of_the_last_to_begin() -> None:
    """Prompts were still being filled in the same steps as the earlier requests."""
    times = [Timed(0.1, 0.09, 1.0), Timed(0.4, 0.02, 1.0), Timed(0.2, 0.05, 1.0), Timed(0.5, 0.04, 1.0)]
    seen = burst_figures(Load(2, SHORT, OUTPUT), times, groups=2)
    assert (seen.ttft_s, seen.tpot_s) == pytest.approx((0.3, 0.03))


def test_answers_in_a_batch_with_long_prompts_outlast_their_prefill() -> None:
    many = dataclasses.replace(FACTS, rows=64, max_model_len=2048, kv_tokens=1 << 20)
    for facts in (FACTS, many):
        short, long = context_loads(facts)
        assert {short, long} <= set(loads(facts))
        assert long.rows * long.prompt / facts.batched_tokens < LONGER / 2
        assert long.prompt + LONGER < facts.max_model_len


def test_one_request_on_virtual_time_takes_its_steps() -> None:
    model, variants = step_times(FACTS, SEEN)
    (one,) = simulate(FACTS, model, variants, [Asked(1.0, 0, 100, 11)])
    first_s = 8e-3 + TOKEN_S * 100 + FACTS.path_s
    assert one.ttft_s == pytest.approx(first_s, rel=0.02)
    assert one.tpot_s == pytest.approx(11e-3 + CONTEXT_S * 105, rel=0.02)
    assert one.total_s == pytest.approx(one.ttft_s + 10 * one.tpot_s)


def test_nearly_idle_engines_have_no_measured_capacity() -> None:
    """Echo engines are such: by the fit they could do thousands of requests a second."""
    played: list[int] = []

    async def at_once(asked: Sequence[Asked]) -> list[Timed]:
        played.append(len(asked))
        return [Timed(1e-4, 1e-5, 1e-4 + 1e-5 * one.output) for one in asked]

    def measured(work: Workload) -> Measured:
        return asyncio.run(measuring.measure(at_once, FACTS, work, repeats=1))

    lengths = ((16, 8), (64, 2))
    assert measured(Workload(0.5, 1.0, lengths)).rate > 1000
    assert measured(Workload(0.5, 1.0, lengths, max_per_s=20.0)).rate == 20.0
    assert played[-1] < 60  # Poisson arrivals of 20: nine standard deviations


def test_a_written_file_is_read_back() -> None:
    asked = measuring.poisson(FACTS, Workload(0.5, 5.0, ((16, 8), (64, 2))), 8.0)
    timed = [Timed(0.01 * (i + 1), 0.001, 0.02 * (i + 1)) for i in range(len(asked))]
    measured = Measured(FACTS, {"measured": SEEN}, 8.0, asked, timed)
    read = measuring.from_json(json.loads(json.dumps(measuring.as_json(measured))))
    assert (read.facts, read.seen, list(read.asked)) == (FACTS, measured.seen, asked)
    assert [dataclasses.astuple(t) for t in read.timed] == [
        pytest.approx(dataclasses.astuple(t)) for t in timed
    ]


def test_errors_are_of_the_simulated_to_the_measured() -> None:
    rows = figures([Timed(0.1, 0.010, 1.0)] * 4, [Timed(0.12, 0.011, 1.0)] * 4)
    assert [row["what"] for row in rows] == ["TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"]
    assert [row["error"] for row in rows] == pytest.approx([0.2, 0.2, 0.1, 0.1])
    assert [row["within"] for row in rows] == [False, False, True, True]
