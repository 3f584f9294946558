"""The serving benchmark's requests and figures, against closed forms and hand-made cases."""

from __future__ import annotations

import json
import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from benchmarks.serving import workload
from benchmarks.serving.metrics import Outcome, highest_rates, ratios, summary
from benchmarks.serving.taking_turns import Turns
from benchmarks.serving.workload import Request, parse_case

LENGTHS = [(10, 20), (30, 40), (50, 60)]


def test_a_trace_is_replayed_unchanged() -> None:
    entries = [
        {"prompt": "x" * 9, "timestamp": 2.5, "model": "delta-9", "max_tokens": 171},
        {"prompt": "", "timestamp": 1.0, "model": "base-model", "max_tokens": 3},
    ]
    text = "\n".join(json.dumps(entry) for entry in entries)
    assert workload.trace_requests(text, 32, 2048) == [Request(1.0, 0, 1, 3), Request(2.5, 9, 4, 171)]
    assert workload.trace_requests(text, 4, 2048)[1].variant == 1


@pytest.mark.parametrize(
    ("given", "clipped"),
    [
        ((10, 20), (10, 20)),
        ((5000, 20), (80, 20)),
        ((5000, 900), (50, 50)),
        ((1, 0), (1, 1)),
        ((0, 5), (1, 5)),
    ],
)
def test_lengths_fit(given: tuple[int, int], clipped: tuple[int, int]) -> None:
    assert workload.clip(*given, 100) == clipped


def test_azure_s_columns_are_read() -> None:
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46,374,44",
        "2023-11-16 18:15:50,4000,109",
    ]
    assert workload.azure_lengths("\n".join(rows), 2048) == [(374, 44), (1939, 109)]


def test_popularity_follows_its_law() -> None:
    assert workload.popularity(4, "uniform") == pytest.approx([0.25] * 4)
    shares = workload.popularity(32, "zipf")
    total = math.fsum(1 / i**1.5 for i in range(1, 33))
    assert shares == pytest.approx([1 / i**1.5 / total for i in range(1, 33)])


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_variation_asked_for(cv: float) -> None:
    times = workload.arrivals(8.0, 20_000, cv, np.random.default_rng(1))
    gaps = np.diff(times)
    assert times.min() >= 0
    assert times.max() < 20_000
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_counts() -> None:
    """The number of arrivals in a second has its mean for its variance."""
    times = workload.arrivals(4.0, 10_000, 1.0, np.random.default_rng(2))
    counts = np.bincount(times.astype(int), minlength=10_000)
    assert counts.mean() == pytest.approx(4, rel=0.05)
    assert counts.var() == pytest.approx(4, rel=0.05)


def test_synthetic_requests_repeat_and_differ_in_who_is_asked_only() -> None:
    zipf, uniform = (
        workload.synthetic(parse_case(f"{kind}@5"), 400, 32, LENGTHS, seed=7) for kind in ("zipf", "uniform")
    )
    assert zipf == workload.synthetic(parse_case("zipf@5"), 400, 32, LENGTHS, seed=7)
    strip = [(r.at_s, r.prompt_tokens, r.output_tokens) for r in zipf]
    assert strip == [(r.at_s, r.prompt_tokens, r.output_tokens) for r in uniform]
    assert {lengths for _, *lengths_ in strip for lengths in [tuple(lengths_)]} == set(LENGTHS)
    asked = np.bincount([r.variant for r in zipf], minlength=33) / len(zipf)
    assert asked[0] == 0
    assert asked[1:] == pytest.approx(workload.popularity(32, "zipf"), abs=0.03)
    assert len({r.variant for r in uniform}) == 32


def test_prompts_share_no_prefix() -> None:
    request = Request(0, 1, 100, 5)
    one, other = (workload.prompt_ids(request, index, 1, 2000) for index in (0, 1))
    assert len(one) == 100
    assert one == workload.prompt_ids(request, 0, 1, 2000)
    assert one[:5] != other[:5]
    assert min(one) >= 3
    assert max(one) < 2000


def test_cases_are_parsed() -> None:
    assert parse_case("azure@0.5").rate == 0.5
    assert parse_case("zipf@4:cv=3").cv == 3
    assert parse_case("uniform@4:cv=3:seed=2").seed == 2
    assert parse_case("zipf@4").seed is None
    assert (parse_case("offline@320").kind, parse_case("offline@320").rate) == ("offline", 320)


@pytest.mark.parametrize(
    "name",
    [
        "zipf4",
        "offline",
        "offline@",
        "offline@all",
        "offline@-3",
        "offline@3.5",
        "offline@3:cv=2",
        "azure@1.0:seed=2",
        "azure@1.0:cv=2",
        "online@3",
        "uniform@4:seed",
        "uniform@4:seed=",
        "uniform@4:seed=1.5",
        "uniform@4:seed=-1",
        "uniform@4seed=1",
    ],
)
def test_an_invalid_case_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a case such as"):
        parse_case(name)


def test_offline_requests_all_come_at_once() -> None:
    """The number of requests equals the requested one, however long arrivals last, for variants and lengths
    alike."""
    case = parse_case("offline@9600")
    requests = workload.synthetic(case, 0.5, 32, LENGTHS, seed=7)
    assert len(requests) == 9600
    assert {r.at_s for r in requests} == {0}
    asked = np.bincount([r.variant for r in requests], minlength=33) / len(requests)
    assert len(asked) == 33
    assert asked[0] == 0
    assert asked[1:] == pytest.approx([1 / 32] * 32, abs=0.01)
    for lengths in LENGTHS:
        share = sum((r.prompt_tokens, r.output_tokens) == lengths for r in requests) / len(requests)
        assert share == pytest.approx(1 / 3, abs=0.03)
    assert requests == workload.synthetic(case, 100, 32, LENGTHS, seed=7)


@pytest.mark.parametrize("kind", ["uniform@20", "zipf@20:cv=3", "offline@200"])
def test_a_cases_seed_comes_before_that_of_the_settings(kind: str) -> None:
    """It differs from others in when (unless that is at once), in who and in how long."""
    zero, one, two = (
        workload.synthetic(parse_case(f"{kind}:seed={seed}"), 10, 32, LENGTHS, seed=7) for seed in (0, 1, 2)
    )
    assert zero == workload.synthetic(parse_case(kind), 10, 32, LENGTHS, seed=0)
    assert one == workload.synthetic(parse_case(kind), 10, 32, LENGTHS, seed=1)
    assert ([r.at_s for r in one] == [r.at_s for r in two]) is kind.startswith("offline")
    assert [r.variant for r in one] != [r.variant for r in two]
    assert [r.prompt_tokens for r in one] != [r.prompt_tokens for r in two]


def test_requests_given_up_count_with_the_time_until_then() -> None:
    outcomes = [
        Outcome(0.1, 1.0, 10),
        Outcome(0.3, 3.0, 10),
        Outcome(0.6, None, 4, 8.0),
        Outcome(None, None, 0, 6.0),
    ]
    found = summary(outcomes, 10.0)
    assert (found["requests"], found["unfinished"]) == (4, 2)
    assert (found["requests_per_s"], found["tokens_per_s"]) == (0.2, 2.4)
    assert found["e2e_mean_s"] == pytest.approx((1 + 3 + 8 + 6) / 4)
    assert found["ttft_p50_s"] == pytest.approx((0.3 + 0.6) / 2)
    assert found["ttft_within"] == {"0.5": 0.5, "1": 0.75, "5": 0.75}
    assert found["e2e_within"] == {"5": 0.5, "10": 0.5, "20": 0.5}


def ratio_row(engine: str, case: str, value: float, limit: int) -> dict[str, object]:
    names = ("requests_per_s", "tokens_per_s", "e2e_mean_s", "e2e_p90_s", "ttft_mean_s", "ttft_p90_s")
    return {"engine": engine, "case": case, "limit": limit, "requests": 3, **dict.fromkeys(names, value)}


def test_ratios_pair_cases() -> None:
    row = ratio_row
    rows = [row("ours", "zipf@1", 2.0, 24), row("ours", "zipf@1", 4.0, 8), row("ours", "zipf@2", 1.0, 8)]
    rows += [{"engine": "baseline", "start_s": 3}, row("baseline", "zipf@1", 8.0, 8)]
    found = [(r["case"], r["limit"], r["e2e_mean_s"]) for r in ratios(rows)]
    assert found == [("zipf@1", 24, 0.25), ("zipf@1", 8, 0.5)]


def test_ratios_name_the_baseline_that_they_are_to() -> None:
    rows = [
        ratio_row("baseline-disk", "offline@9", 16.0, 8),
        ratio_row("ours", "offline@9", 4.0, 24),
        ratio_row("baseline", "offline@9", 8.0, 8),
        ratio_row("ours", "zipf@1:seed=2", 3.0, 24),
        ratio_row("baseline", "zipf@1:seed=1", 2.0, 8),  # which ours has with another seed only
        ratio_row("baseline-disk", "zipf@1:seed=2", 2.0, 8),
        {"engine": "baseline", "case": "zipf@1:seed=2", "limit": 8, "left_out": "no time"},
    ]
    found = {(r["case"], r["limit"], r["to"]): r["tokens_per_s"] for r in ratios(rows)}
    assert found == {
        ("offline@9", 24, "baseline"): 0.5,
        ("offline@9", 24, "baseline-disk"): 0.25,
        ("zipf@1:seed=2", 24, "baseline-disk"): 1.5,
    }
    assert len(ratios(rows)) == 3


def test_models_take_turns() -> None:
    turns = Turns(2)
    steps = [
        turns.next(runnable)
        for runnable in [{1, 3}, {1, 3}, {1, 3}, {1, 2, 3}, {1, 2, 3}, {2}, set(), {2, 5}]
    ]
    assert steps == [1, 1, 3, 3, 1, 2, None, 2]
    assert turns.next({2, 5}) == 5
    turns.end()
    assert turns.next({2, 5}) == 2


def test_tpot_is_of_the_tokens_after_the_first() -> None:
    assert Outcome(ttft_s=1.0, e2e_s=3.0, tokens=5).tpot_s() == 0.5
    assert Outcome(ttft_s=1.0, tokens=5, given_up_s=5.0).tpot_s() == 1.0
    assert Outcome(ttft_s=1.0, e2e_s=1.0, tokens=1).tpot_s() is None
    assert Outcome(given_up_s=2.0).tpot_s() is None


def rate_row(engine: str, rate: float, ttft_s: float, tpot_s: float, more: str = "") -> dict[str, Any]:
    found = {"ttft_p90_s": ttft_s, "tpot_p90_s": tpot_s}
    return {"engine": engine, "limit": 4, "case": f"uniform@{rate:g}{more}", "requests": 9, **found}


def test_a_rate_holds_only_where_all_lower_ones_do() -> None:
    row = rate_row
    rows = [
        row("ours", 8, 0.9, 0.04),  # after one that broke it
        row("ours", 2, 0.1, 0.02),
        row("ours", 4, 0.9, 0.05),
        row("ours", 6, 1.1, 0.04),
        row("baseline", 1, 0.2, 0.2),
        {"engine": "ours", "limit": 4, "case": "azure@1.0", "requests": 9, "ttft_p90_s": 9.0},
        {"engine": "ours", "limit": 4, "case": "uniform@12", "left_out": "no time"},
        {"engine": "ours", "limit": 4, "case": "uniform@1", "requests": 9, "ttft_p90_s": 9.0},  # of before
    ]
    found = {(row["engine"], row["promise"]): (row["rate"], row["broken_at"]) for row in highest_rates(rows)}
    assert found == {
        ("ours", "1 s, 50 ms"): (4.0, 6.0),
        ("ours", "5 s, 100 ms"): (8.0, None),
        ("baseline", "1 s, 50 ms"): (None, 1.0),
        ("baseline", "5 s, 100 ms"): (None, 1.0),
    }


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_rate_holds_only_if_it_does_with_every_seed(order: tuple[int, ...]) -> None:
    """In whichever order they were measured; one breaks TTFT, another one TPOT."""
    seeds = [
        rate_row("ours", 4, 0.9, 0.04),
        rate_row("ours", 4, 2.0, 0.04, ":seed=2"),
        rate_row("ours", 4, 0.9, 0.2, ":seed=3"),
    ]
    lower = [rate_row("ours", 2, 0.1, 0.02, more) for more in ("", ":seed=2")]
    broken = highest_rates([*(seeds[which] for which in order), *lower])
    assert [(row["rate"], row["broken_at"]) for row in broken] == [(2.0, 4.0)] * 2
    without_the_third = highest_rates([*(seeds[which] for which in order if which != 2), *lower])
    found = {row["promise"]: (row["rate"], row["broken_at"]) for row in without_the_third}
    assert found == {"1 s, 50 ms": (2.0, 4.0), "5 s, 100 ms": (4.0, None)}


def test_a_case_measured_again_counts_once() -> None:
    rows = [rate_row("ours", 4, 9.0, 0.04), rate_row("ours", 4, 0.9, 0.04)]
    assert {row["rate"] for row in highest_rates(rows)} == {4.0}
    again = [ratio_row("ours", "zipf@1", value, 8) for value in (4.0, 6.0)]
    (found,) = ratios([*again, ratio_row("baseline", "zipf@1", 2.0, 8)])
    assert found["tokens_per_s"] == 3.0


def test_bursts_have_no_highest_rate() -> None:
    """They are not another seed of the Poisson case."""
    rows = [rate_row("ours", 4, 0.9, 0.04), rate_row("ours", 4, 9.0, 0.04, ":cv=3")]
    assert {row["rate"] for row in highest_rates(rows)} == {4.0}


def test_nothing_is_compared_to_a_baseline_that_has_finished_nothing() -> None:
    baseline = {**ratio_row("baseline", "zipf@1", 2.0, 8), "requests_per_s": 0.0}
    (found,) = ratios([ratio_row("ours", "zipf@1", 4.0, 8), baseline])
    assert (found["requests_per_s"], found["tokens_per_s"]) == (None, 2.0)


def test_requests_all_at_once_have_no_rate() -> None:
    rows = [rate_row("ours", 4, 0.9, 0.04)]
    alone = highest_rates(rows)
    offline = {"engine": "ours", "limit": 4, "requests": 9, "tpot_p90_s": 0.01}
    rows += [
        {**offline, "case": f"offline@{number}", "ttft_p90_s": ttft} for number, ttft in ((2, 9), (6, 0.1))
    ]
    assert highest_rates(rows) == alone
    assert {row["popularity"] for row in alone} == {"uniform"}
    assert highest_rates(rows[1:]) == []
