"""Whether what failed is tried again: bounded attempts, growing pauses, the last reason kept."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane import errors
from controlplane.errors import error_classes
from controlplane.planning import retrying
from controlplane.planning.retrying import RetryLimits
from controlplane.state.records import Attempts

LIMITS = st.builds(
    RetryLimits,
    attempts=st.integers(1, 20),
    first_pause_s=st.floats(0.01, 10),
    max_pause_s=st.floats(0.01, 100),
    total_s=st.floats(1, 10_000),
)
# The time of each attempt until it fails; some begin late, because the engine was away.
DURATIONS = st.lists(st.floats(0, 400), min_size=25, max_size=25)


def played(limits: RetryLimits, durations: list[float]) -> tuple[list[tuple[float, float]], float]:
    """Every attempt fails: when each began and failed, and when the decision was to give up."""
    attempts, now_s, runs = Attempts(), 1000.0, []
    for number, duration in enumerate(durations):
        assert retrying.due(attempts, now_s)
        runs.append((now_s, now_s + duration))
        now_s += duration
        after = retrying.failed(attempts, f"reason {number}", now_s, limits)
        if after is None:
            return runs, now_s
        assert (after.failures, after.reason) == (number + 1, f"reason {number}")
        assert not retrying.due(after, after.retry_at_s - 1e-6)
        attempts, now_s = after, after.retry_at_s
    raise AssertionError(f"still trying after {len(runs)} attempts")


@given(limits=LIMITS, durations=DURATIONS)
def test_attempts_are_bounded_in_number_and_time(limits: RetryLimits, durations: list[float]) -> None:
    runs, _ = played(limits, durations)
    assert 1 <= len(runs) <= limits.attempts
    first_failed_s = runs[0][1]
    assert all(began_s <= first_failed_s + limits.total_s + 1e-6 for began_s, _ in runs)


@given(limits=LIMITS, durations=DURATIONS)
def test_pauses_grow_up_to_their_limit(limits: RetryLimits, durations: list[float]) -> None:
    runs, _ = played(limits, durations)
    pauses = [later[0] - earlier[1] for earlier, later in pairwise(runs)]
    for number, pause in enumerate(pauses):
        assert pause == pytest.approx(min(limits.max_pause_s, limits.first_pause_s * 2**number), abs=1e-6)


@given(limits=LIMITS, durations=DURATIONS)
def test_no_attempt_is_given_away(limits: RetryLimits, durations: list[float]) -> None:
    """It ends early only because the next attempt would begin too late."""
    runs, ended_s = played(limits, durations)
    if len(runs) < limits.attempts:
        pause = min(limits.max_pause_s, limits.first_pause_s * 2 ** (len(runs) - 1))
        assert ended_s + pause > runs[0][1] + limits.total_s - 1e-6


@given(failures=st.integers(0, 10**6), limits=LIMITS)
def test_a_pause_is_a_time(failures: int, limits: RetryLimits) -> None:
    assert 0 < retrying.pause_s(failures, limits) <= limits.max_pause_s


KEYS = [f"load variant-{n}" for n in range(200)]


@given(failures=st.integers(1, 100), limits=LIMITS)
def test_variants_that_failed_together_are_retried_at_different_times(
    failures: int, limits: RetryLimits
) -> None:
    """Pauses of many variants after equal failures: each is the same at every call, within their share, and
    spread over all of it."""
    whole = retrying.pause_s(failures, limits)
    pauses = sorted(retrying.pause_s(failures, limits, key) for key in KEYS)
    assert pauses == sorted(retrying.pause_s(failures, limits, key) for key in reversed(KEYS))
    shares = [(1 - pause / whole) / retrying.SPREAD for pause in pauses]
    assert min(shares) == pytest.approx(0, abs=0.1)
    assert max(shares) == pytest.approx(1, abs=0.1)
    assert min(shares) > -1e-9
    assert max(shares) < 1 + 1e-9
    # One tenth of the share has 20 of 200 random times on average; 60 would be a herd.
    assert max(sum(low <= share < low + 0.1 for share in shares) for low in shares) < 60


def test_the_announced_retry_time_is_kept() -> None:
    after = retrying.failed(Attempts(), "gone", 100.0, retrying.LOADING, "a variant")
    assert after is not None
    pause = retrying.pause_s(1, retrying.LOADING, "a variant")
    assert after.retry_at_s == pytest.approx(100.0 + pause)
    assert f"after {round(pause, 1):g} s" in retrying.describe(after, retrying.LOADING, "a variant")


@given(back_s=st.floats(0.001, 1e9))
def test_a_clock_that_was_set_back_puts_nothing_off(back_s: float) -> None:
    attempts = retrying.failed(Attempts(), "gone", 1e9, retrying.LOADING)
    assert attempts is not None
    assert retrying.due(attempts, 1e9 - back_s)


def test_errors_of_the_variant_or_the_request_are_final() -> None:
    """Those errors are temporary that a client may repeat unchanged (their status says so)."""
    passing = {cls for cls in error_classes().values() if retrying.may_pass(cls("x"))}
    repeatable = {cls for cls in error_classes().values() if cls.status in (429, 502, 503, 504)}
    assert passing == (repeatable | {errors.StaleWrite}) - {
        errors.ProfilingFailed,
        errors.CompressionFailed,
        errors.Late,
    }
    assert retrying.may_pass(TimeoutError())
    assert retrying.may_pass(ConnectionResetError())


def test_the_reason_names_failure_and_next_attempt() -> None:
    error = errors.EngineFailed(
        "the engine of 'b' died during this call; try again", details={"group": "b"}, retry_after_s=5
    )
    first = retrying.failed(Attempts(), retrying.cause(error), 100.0, retrying.LOADING)
    assert first == Attempts(1, 100.0, 102.0, "the engine of 'b' died during this call")
    assert retrying.describe(first, retrying.LOADING) == (
        "attempt 1 of 5 failed (the engine of 'b' died during this call); the next attempt begins after 2 s"
    )
    last = retrying.given_up(Attempts(4, 100.0, 130.0, "x"), error, 131.0, "look into its log")
    assert isinstance(last, errors.EngineFailed)
    assert last.retry_after_s == 5
    assert last.details == {"group": "b"}
    assert last.message == (
        "5 attempts within 31 s failed, the last error: the engine of 'b' died during this call; "
        "look into its log"
    )
    assert retrying.cause(ConnectionResetError("peer; gone")) == "ConnectionResetError: peer"
