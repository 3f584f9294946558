"""Sums over an engine's steps: closed forms, outliers, and what is no time; vLLM's figures as they come."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.step_observer import MOST, REMEMBERED, StepObserver, Sums
from workers.engine.vllm_stats import StatLogger, stat_loggers

TIMES = st.floats(1e-4, 10.0)
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)


def mean_s(observer: StepObserver) -> float:
    return observer.sums.decode_s / observer.sums.steps


@given(TIMES, st.integers(1, 50), st.integers(1, 64))
def test_steady_steps_are_reported_exactly(step_s: float, steps: int, rows: int) -> None:
    observer = StepObserver()
    for _ in range(steps):
        observer.step([step_s] * rows)
    assert observer.sums.steps == steps
    assert mean_s(observer) == pytest.approx(step_s)


@given(st.lists(TIMES, min_size=3, max_size=9), st.integers(0, 20), st.integers(0, 2**32))
def test_a_stopped_row_says_nothing_about_the_step(gaps_s: list[float], at: int, seed: int) -> None:
    """Fewer than half of the rows, with any gap: the figure stays within those of the others."""
    observer = StepObserver()
    observer.step([*gaps_s, *[100.0 + seed % 1000] * ((len(gaps_s) - 1) // 2)])
    assert min(gaps_s) <= mean_s(observer) <= max(gaps_s)


@given(TIMES, ANYTHING)
def test_one_unusual_step_moves_the_mean_a_little(step_s: float, strange_s: float) -> None:
    observer = StepObserver()
    for _ in range(20):
        observer.steps(1, step_s)
    observer.steps(1, strange_s)
    assert 20 <= observer.sums.steps <= 21
    assert 20 / 21 * step_s <= mean_s(observer) * (1 + 1e-9)
    assert mean_s(observer) <= (20 + MOST) / 21 * step_s * (1 + 1e-9)


@given(TIMES, st.floats(1.0, 100.0))
def test_a_new_pace_is_followed(step_s: float, factor: float) -> None:
    observer = StepObserver()
    for _ in range(100):
        observer.steps(1, step_s)
    for _ in range(REMEMBERED):
        observer.steps(1, factor * step_s)
    before = observer.sums
    observer.steps(1, factor * step_s)
    assert observer.sums.decode_s - before.decode_s == pytest.approx(factor * step_s)


@given(st.lists(st.tuples(st.integers(-2, 5), ANYTHING)), st.lists(ANYTHING, max_size=5))
def test_sums_stay_finite_and_only_grow(seen: list[tuple[int, float]], gaps: list[float]) -> None:
    observer, before = StepObserver(), Sums()
    for count, seconds in seen:
        observer.steps(count, seconds)
        observer.step(gaps)
        observer.prefill(count, seconds)
        observer.requests(count, count, seconds)
        now = observer.sums
        pairs = zip(vars(before).values(), vars(now).values(), strict=True)
        assert all(old <= new < math.inf for old, new in pairs)
        assert 0.0 <= observer.kv_usage <= 1.0
        assert min(observer.running, observer.waiting) >= 0
        before = now


def test_a_change_is_reported() -> None:
    observer, told = StepObserver(), []
    observer.changed = lambda: told.append(1)
    observer.requests(1, 0, 0.1)
    observer.step([0.01])
    observer.prefill(8, 0.1)
    assert len(told) == 3
    observer.step([])
    observer.prefill(0, 0.1)
    assert len(told) == 3


# --- vLLM's ----------------------------------------------------------------------------------------


def iteration(gaps_s: tuple[float, ...] = (), *ended: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(inter_token_latencies_iter=list(gaps_s), finished_requests=list(ended))


def test_vllms_figures_are_taken() -> None:
    observer = StepObserver()
    (make,) = stat_loggers(observer)
    logger = make(object(), 0)
    scheduler = SimpleNamespace(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25
    )
    ended = SimpleNamespace(num_prompt_tokens=100, num_cached_tokens=36, prefill_time=0.5)
    logger.record(scheduler, iteration((0.02, 0.02, 0.03), ended), mm_cache_stats=None, engine_idx=0)
    assert (observer.running, observer.waiting, observer.kv_usage) == (3, 3, 0.25)
    assert observer.sums == Sums(1, 0.02, 64, 0.5)
    for method in (logger.log, logger.log_engine_initialized, logger.record_sleep_state):
        method()


@pytest.mark.parametrize(
    "stats",
    [None, object(), SimpleNamespace(inter_token_latencies_iter=7), SimpleNamespace(finished_requests=[1])],
)
def test_attributes_that_a_version_lacks_are_skipped(stats: object) -> None:
    observer = StepObserver()
    logger = StatLogger(observer)
    logger.record(SimpleNamespace(num_running_reqs=1), stats)
    logger.record(None, iteration((0.02,)))
    assert (observer.running, observer.waiting, observer.kv_usage) == (1, 0, 0.0)
    assert observer.sums == Sums(1, 0.02)
