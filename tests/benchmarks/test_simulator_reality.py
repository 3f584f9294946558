"""Step times fitted to loads, against those that the loads were made with; one request, by hand."""

from __future__ import annotations

import dataclasses
import json
import statistics

import numpy as np
import pytest

from benchmarks.simulator_reality import measuring
from benchmarks.simulator_reality.calibrating import (
    FIRST,
    OUTPUT,
    SHORT,
    Load,
    Seen,
    burst,
    loads,
    step_times,
    told,
)
from benchmarks.simulator_reality.comparing import figures
from benchmarks.simulator_reality.mean_bursts import step_times_of_means
from benchmarks.simulator_reality.measuring import Measured, Workload
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
)
ROW_S = {"lora": 2e-4, "sparse_delta": 5e-4}
BYTE_S = {"lora": 1e-8, "sparse_delta": 2e-9}
LAUNCH_S = {"lora": 3e-3, "sparse_delta": 4e-3}
CONTEXT_S, TOKEN_S = 2e-6, 1e-4


def tpot_s(load: Load) -> float:
    """Steps of 10 ms and 1 ms for each row; and what `ROW_S`, `BYTE_S` and `LAUNCH_S` say."""
    asked = [load.models[i % len(load.models)] for i in range(load.rows)]
    chosen = [FACTS.variants[model - 1] for model in asked if model]
    seconds = 10e-3 + 1e-3 * load.rows + CONTEXT_S * load.rows * (load.prompt + OUTPUT / 2)
    seconds += sum(ROW_S[one.kind] for one in chosen)
    seconds += sum(BYTE_S[one.kind] * one.size_bytes for one in set(chosen))
    return seconds + sum(LAUNCH_S[kind] for kind in {one.kind for one in chosen})


def ttft_s(load: Load) -> float:
    added_s = 5e-6 if load.models != (0,) else 0.0
    return FACTS.path_s + 8e-3 + (TOKEN_S + added_s) * load.prompt


SEEN = [Seen(load, ttft_s(load), tpot_s(load)) for load in loads(FACTS)]


def test_the_base_is_found_again() -> None:
    model, _ = step_times(FACTS, SEEN)
    assert model[0].context_s == pytest.approx(CONTEXT_S)
    for rows in range(1, 65):
        assert model[0].decode_s[rows] == pytest.approx(10e-3 + 1e-3 * rows)
    for tokens in (SHORT, 100, 300, 2048):
        assert prefill_curve_s(model[0], float(tokens)) == pytest.approx(8e-3 + TOKEN_S * tokens, rel=0.01)
    assert (model[0].max_rows, model[0].kv_tokens, model[0].path_s) == (8, 8192, 0.003)


@pytest.mark.parametrize("models", [(1,), (2,), (3,), (1, 2), (0, 3), (1, 2, 3)])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_steps_with_variants_take_what_they_were_seen_to(models: tuple[int, ...], rows: int) -> None:
    """Also those of batches that no load had."""
    model, variants = step_times(FACTS, SEEN)
    load = Load(rows, SHORT, OUTPUT, models)
    asked = [models[i % len(models)] for i in range(rows)]
    seconds = model[0].decode_s[rows] + model[0].context_s * rows * (SHORT + OUTPUT / 2)
    seconds += sum(variants[n].row_s for n in asked) + sum(variants[n].variant_s for n in set(asked))
    seconds += sum(model[0].launch_s[kind] for kind in {variants[n].kind for n in asked if n})
    assert seconds == pytest.approx(tpot_s(load), rel=0.01)


def test_what_a_variant_adds_to_prompts() -> None:
    _, variants = step_times(FACTS, SEEN)
    assert [one.token_s for one in variants] == pytest.approx([0.0, 5e-6, 5e-6, 5e-6])


@pytest.mark.parametrize("context_s", [0.0, 5e-7, 2e-6])
def test_the_time_of_a_cached_token_is_found_in_means_of_bursts(context_s: float) -> None:
    """Prompts of the long burst fill two steps; from its mean alone follows a time that is too long."""
    model, variants = step_times(FACTS, SEEN)
    model.context_s = context_s
    model.decode_s = 10e-3 + 1e-3 * np.arange(model.decode_s.shape[1])
    means = []
    for load in loads(FACTS):
        times = simulate(FACTS, model, variants, burst(load, FACTS.groups))
        ttft_s, tpot_s = ([getattr(one, what) for one in times] for what in ("ttft_s", "tpot_s"))
        means.append(Seen(load, statistics.mean(ttft_s), statistics.mean(tpot_s)))
    found, _ = step_times_of_means(FACTS, means)
    assert found[0].context_s == pytest.approx(context_s, rel=0.01, abs=1e-9)
    assert step_times(FACTS, means)[0][0].context_s > context_s + 2e-7


def test_bursts_give_every_group_the_same() -> None:
    asked = burst(Load(3, SHORT, FIRST, (0, 2)), groups=2)
    assert [one.model for one in asked[::2]] == [one.model for one in asked[1::2]] == [0, 2, 0]
    assert {one.at_s for one in asked} == {0.0}


def test_tpot_is_that_of_the_last_to_begin() -> None:
    """Beside those before, prompts were still being filled."""
    times = [Timed(0.1, 0.09, 1.0), Timed(0.4, 0.02, 1.0), Timed(0.2, 0.05, 1.0), Timed(0.5, 0.04, 1.0)]
    assert told(times, groups=2) == pytest.approx((0.3, 0.03))


def test_long_prompts_of_a_load_are_filled_in_few_steps() -> None:
    many = dataclasses.replace(FACTS, rows=64, max_model_len=2048, kv_tokens=1 << 20)
    for facts in (FACTS, many):
        (long,) = (load for load in loads(facts) if load.prompt > SHORT and load.output == OUTPUT)
        assert long.rows * long.prompt <= 4 * facts.batched_tokens
        assert long.prompt + OUTPUT < facts.max_model_len


def test_one_request_on_virtual_time_takes_its_steps() -> None:
    model, variants = step_times(FACTS, SEEN)
    (one,) = simulate(FACTS, model, variants, [Asked(1.0, 0, 100, 11)])
    first_s = 8e-3 + TOKEN_S * 100 + FACTS.path_s
    assert one.ttft_s == pytest.approx(first_s, rel=0.02)
    assert one.tpot_s == pytest.approx(11e-3 + CONTEXT_S * 105, rel=0.02)
    assert one.total_s == pytest.approx(one.ttft_s + 10 * one.tpot_s)


def test_what_is_written_is_read_again() -> None:
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
