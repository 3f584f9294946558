"""Measurements on disk, and what a run's token times say, against plain accounts of the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.errors import MeasurementError
from profiler.measurements import (
    Footprint,
    Log,
    Measurement,
    Point,
    RankMemory,
    Setting,
    Timing,
    from_lines,
    read,
    to_line,
)
from workers.measuring.timing import Arrivals, decode_ms, prompt_of, timing

SMALL = st.integers(1, 10_000)
SECONDS = st.floats(0, 1e4, allow_nan=False)
SETTINGS = st.builds(
    Setting, st.lists(SMALL, min_size=1, max_size=4).map(tuple), SMALL, st.sampled_from(["none", "fp8"])
)
TIMINGS = st.builds(
    Timing, SETTINGS, st.builds(Point, SMALL, SMALL), SMALL, *[SECONDS] * 4, st.lists(SECONDS).map(tuple)
)
RANKS = st.builds(RankMemory, *[st.integers(0, 2**50)] * 6)
MEASUREMENTS = st.one_of(TIMINGS, st.builds(Footprint, SETTINGS, st.lists(RANKS).map(tuple), SECONDS))
FOOTPRINT = Footprint(Setting((1, 1), 2), (RankMemory(1, 2, 3, 4, 5, 6),), 7.5)


@given(st.lists(MEASUREMENTS))
def test_a_written_file_is_read_back(measurements: list[Measurement]) -> None:
    assert list(from_lines(map(to_line, measurements), "here")) == measurements


def test_a_line_that_a_crash_cut_is_left_out_and_its_rest_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    Log(path).append(FOOTPRINT)
    with path.open("a") as file:
        file.write(to_line(FOOTPRINT)[:30])
    assert read(path) == (FOOTPRINT,)
    Log(path).append(FOOTPRINT)
    assert read(path) == (FOOTPRINT, FOOTPRINT)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[]", "expected a JSON object"),
        ("{", "expected a JSON object"),
        ('{"kind": "guess"}', "timing or footprint"),
        (json.dumps({**json.loads(to_line(FOOTPRINT)), "start_s": "soon"}), "start_s"),
        (
            json.dumps({**json.loads(to_line(FOOTPRINT)), "setting": {"layers_per_stage": [0]}}),
            "at least one",
        ),
    ],
)
def test_an_invalid_measurement_is_refused_with_its_line(line: str, told: str) -> None:
    with pytest.raises(MeasurementError, match=r"found\.jsonl, line 2") as refused:
        list(from_lines([to_line(FOOTPRINT), line], "found.jsonl"))
    assert told in str(refused.value)


def test_memory_outside_the_kv_cache_is_measured() -> None:
    assert FOOTPRINT.ranks[0].without_kv_cache == 10


def test_a_step_is_timed_while_all_requests_decode() -> None:
    """Two requests; the second begins at 3 and the first ends at 6: steps between these take 1 s, those
    of the first alone took 0.5 s, and the second's alone take 2 s."""
    first, second = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0), (3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
    run = Arrivals((first, second))
    assert run.step_s == pytest.approx(1.0)
    found = timing(Setting((2,)), Point(2, 8), 7, [run], ())
    assert (found.ttft_s, found.ttft_last_s, found.latency_s) == (2.0, 3.0, 10.0)


def test_a_decode_step_is_distinguished_from_parts_of_prefill_steps() -> None:
    """64 fills replay each piece of a layer, 6 steps the whole batch's graph, two that of a smaller one."""
    pieces, whole, smaller = [[0.36] * 64, [1.2] * 64], [9.3, 9.2, 9.4, 9.3, 9.3, 30.0], [12.0, 12.0]
    assert decode_ms([*pieces, whole, smaller]) == 9.3
    assert decode_ms([smaller, [5.0]]) == 12.0


def test_requests_that_never_decode_together_are_timed_each_by_itself() -> None:
    run = Arrivals(((1.0, 2.0, 3.0), (5.0, 7.0, 9.0)))
    assert run.step_s == pytest.approx((1.0 + 2.0) / 2)


def test_prompts_differ_from_their_first_token_on() -> None:
    """Nothing may be found in a cache of prefixes or be a multiple of another prompt."""
    prompts = [prompt_of(16, seed) for seed in range(200)]
    assert len({tuple(p) for p in prompts}) == 200
    assert all(10 <= token < 1000 for prompt in prompts for token in prompt)
