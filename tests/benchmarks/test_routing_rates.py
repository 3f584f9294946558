"""The search for the largest rate, where the answer is known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing.caraserve import interval
from benchmarks.routing.rates import largest_rate


@given(threshold=st.floats(1.0, 1e5), guess=st.floats(1.0, 1e5), precision=st.sampled_from([0.01, 0.03, 0.1]))
def test_the_largest_rate_is_found_to_the_precision(threshold: float, guess: float, precision: float) -> None:
    found = largest_rate(lambda rate: rate <= threshold, guess, precision)
    if threshold < guess / 1000:
        assert found == 0.0 or found <= threshold
    else:
        assert found <= threshold <= found * (1 + precision) * (1 + 1e-9)


def test_an_interval_is_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert abs(half - 3.182446 * 1.2909944 / 2) < 1e-5
